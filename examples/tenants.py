"""Asks the same for several tenants: no tenant is faster because of another, so none learns what another asked.

printf '[keys]\n"sk-of-ann" = "ann"\n"sk-of-bob" = "bob"\n' > keys.toml; chmod 600 keys.toml
kvtier serve --model smollm2 --config laptop --api-keys keys.toml
python examples/tenants.py report.txt "Who wrote it?" --key sk-of-ann --key sk-of-bob
"""

from server import arguments, origin, read_text  # first: errors of the imports below are one line, too

# isort: split
from pathlib import Path

import openai


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--key", action="append", required=True, metavar="KEY", help="the API key of a tenant; may be repeated"
    )
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("question")
    options = parser.parse_args()
    document = read_text(options.document)

    for time in ("first", "second"):
        for number, key in enumerate(options.key, start=1):
            client = openai.OpenAI(base_url=options.base_url, api_key=key)
            done = client.chat.completions.create(
                model=options.model,
                messages=[{"role": "user", "content": f"{document}\n\n{options.question}"}],
                max_tokens=options.max_tokens,
                temperature=0,
            )
            print(f"tenant {number}, {time} time\n  {done.choices[0].message.content}\n  {origin(done.kvtier)}")


if __name__ == "__main__":
    main()
