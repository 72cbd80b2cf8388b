"""Answers questions with LlamaIndex: its OpenAILike asks kvtier, and the retriever below finds the passages.

python examples/rag_llama_index.py report.txt "Who wrote it?" "What does it cost?"
"""

from server import arguments, origin, read_text  # first: errors of the imports below are one line, too

# isort: split
from pathlib import Path

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike
from passages import best_passages


class PassageRetriever(BaseRetriever):
    """Finds passages by the words of a question: no embedding model is needed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = best_passages(self._text, query_bundle.query_str)
        return [NodeWithScore(node=TextNode(text=passage)) for passage in found]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("questions", nargs="+", metavar="question")
    options = parser.parse_args()
    retriever = PassageRetriever(read_text(options.document))
    model = OpenAILike(
        api_base=options.base_url,
        api_key=options.api_key,
        max_retries=0,
        model=options.model,
        is_chat_model=True,
        temperature=0,
        max_tokens=options.max_tokens,
    )

    for question in options.questions:
        found = "\n\n".join(node.get_content() for node in retriever.retrieve(question))
        answer = model.chat([ChatMessage(role="user", content=f"{found}\n\n{question}")])
        print(f"{question}\n  {answer.message.content}\n  {origin(answer.raw.kvtier)}")


if __name__ == "__main__":
    main()
