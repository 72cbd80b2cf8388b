"""Asks questions about a long PDF or text: the first question computes its KV cache, and the others find it there.

pip install '.[examples]'
kvtier serve --model smollm2 --config laptop
python examples/ask_document.py report.pdf "Who wrote it?" "What does it cost?"
"""

from server import arguments, origin, read_text  # first: errors of the imports below are one line, too

# isort: split
from pathlib import Path

import openai


def text_of(path: Path) -> str:
    """Return the text of a PDF, or of a text file."""
    if path.suffix.lower() != ".pdf":
        return read_text(path)
    import pypdf

    try:
        return "\n".join(page.extract_text() for page in pypdf.PdfReader(path).pages)
    except pypdf.errors.PyPdfError as error:
        raise SystemExit(f"{path}: this PDF cannot be read ({error}); give another file") from None


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
