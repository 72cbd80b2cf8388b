"""Asks questions about a long PDF or text: the first question has it computed, the others find it in the cache.

pip install '.[examples]'
kvtier serve --model smollm2 --config laptop
python examples/ask_document.py report.pdf "Who wrote it?" "What does it cost?"
"""

from pathlib import Path

import openai

from server import arguments, origin


def text_of(path: Path) -> str:
    """The text of a PDF, or of a text file."""
    if path.suffix.lower() != ".pdf":
        return path.read_text(encoding="utf-8")
    import pypdf

    return "\n".join(page.extract_text() for page in pypdf.PdfReader(path).pages)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("questions", nargs="+", metavar="question")
    options = parser.parse_args()
    document = text_of(options.document)
    client = openai.OpenAI(base_url=options.base_url, api_key=options.api_key)

    for question in options.questions:
        # The document first, and what differs after it: a cache is found by how a prompt begins.
        done = client.chat.completions.create(
            model=options.model,
            messages=[{"role": "user", "content": f"{document}\n\n{question}"}],
            max_tokens=options.max_tokens,
            temperature=0,
        )
        print(f"{question}\n  {done.choices[0].message.content}\n  {origin(done.kvtier)}")


if __name__ == "__main__":
    main()
