"""Answers questions with LangChain's ChatOpenAI: the passages that fit a question go before it.

LangChain hands on OpenAI's usage fields only, so this prints how many tokens were cached, not in which tier.

    python examples/rag_langchain.py report.txt "Who wrote it?" "What does it cost?"
"""

from server import arguments, read_text  # first: errors of the imports below are one line, too

# isort: split
from pathlib import Path

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from passages import best_passages


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("questions", nargs="+", metavar="question")
    options = parser.parse_args()
    document = read_text(options.document)
    model = ChatOpenAI(
        base_url=options.base_url,
        api_key=options.api_key,
        model=options.model,
        temperature=0,
        max_tokens=options.max_tokens,
    )

    def with_passages(question: str) -> dict[str, str]:
        return {"passages": "\n\n".join(best_passages(document, question)), "question": question}

    prompt = ChatPromptTemplate.from_messages([("user", "{passages}\n\n{question}")])
    chain = RunnableLambda(with_passages) | prompt | model

    for question in options.questions:
        answer = chain.invoke(question)
        usage = answer.usage_metadata
        cached = usage["input_token_details"]["cache_read"]
        print(f"{question}\n  {answer.content}\n  [{cached:,} of {usage['input_tokens']:,} tokens cached]")


if __name__ == "__main__":
    main()
