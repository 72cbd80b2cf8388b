"""Asks questions about a long text with the `anthropic` client; `cache_control` keeps the text for an hour.

pip install '.[examples]'
kvtier serve --model smollm2 --config laptop
python examples/ask_anthropic.py report.txt "Who wrote it?" "What does it cost?"
"""

from server import arguments, origin, read_text  # first: errors of the imports below are one line, too

# isort: split
from pathlib import Path

import anthropic


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("questions", nargs="+", metavar="question")
    options = parser.parse_args()
    source = {"type": "text", "media_type": "text/plain", "data": read_text(options.document)}
    document = {"type": "document", "source": source, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    # This client adds /v1 itself.
    client = anthropic.Anthropic(base_url=options.base_url.removesuffix("/v1"), api_key=options.api_key)

    for question in options.questions:
        done = client.messages.create(
            model=options.model,
            messages=[{"role": "user", "content": [document, {"type": "text", "text": question}]}],
            max_tokens=options.max_tokens,
            extra_body={"temperature": 0},
        )
        used = done.usage
        print(f"{question}\n  {done.content[0].text}\n  {origin(done.kvtier)}")
        print(f"  ({used.cache_read_input_tokens} read, {used.cache_creation_input_tokens} kept from now on)")


if __name__ == "__main__":
    main()
