"""Asks questions about the pages of a PDF as images: the first question computes their KV cache, the others find it.

The model must see images, such as SmolVLM or Qwen-VL.

pip install '.[examples]'
kvtier serve HuggingFaceTB/SmolVLM-256M-Instruct --config laptop
python examples/ask_pages.py report.pdf "What is the total?" "Who signed it?" --model SmolVLM-256M-Instruct
"""

from server import arguments, origin  # first: errors of the imports below are one line, too

# isort: split
import base64
import io
from pathlib import Path

import openai


def pages_of(path: Path, first: int, last: int, width: int) -> list[str]:
    """Return data URLs of the pages *first* to *last* of a PDF, as images of the given *width* in pixels."""
    import pypdfium2

    with path.open("rb") as file:
        data = file.read()
    try:
        pages = list(pypdfium2.PdfDocument(data))[first - 1 : last]
    except pypdfium2.PdfiumError as error:
        raise SystemExit(f"{path}: this PDF cannot be read ({error}); give another file") from None
    urls = []
    for page in pages:
        picture = io.BytesIO()
        page.render(scale=width / page.get_width()).to_pil().save(picture, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}")
    return urls


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--first", type=int, default=1, metavar="PAGE", help="first page (%(default)s)")
    parser.add_argument("--last", type=int, default=4, metavar="PAGE", help="last page (%(default)s)")
    parser.add_argument("--width", type=int, default=800, metavar="PIXELS", help="of a page (%(default)s)")
    parser.add_argument("document", type=Path, help="a PDF")
    parser.add_argument("questions", nargs="+", metavar="question")
    options = parser.parse_args()
    pages = pages_of(options.document, options.first, options.last, options.width)
    client = openai.OpenAI(base_url=options.base_url, api_key=options.api_key)

    for question in options.questions:
        # The pages first, and what differs after them: a cache is found by how a prompt begins.
        images = [{"type": "image_url", "image_url": {"url": page}} for page in pages]
        done = client.chat.completions.create(
            model=options.model,
            messages=[{"role": "user", "content": [*images, {"type": "text", "text": question}]}],
            max_tokens=options.max_tokens,
            temperature=0,
        )
        print(f"{question}\n  {done.choices[0].message.content}\n  {origin(done.kvtier)}")


if __name__ == "__main__":
    main()
