"""Runs a chat of many turns, each of which computes only what is new. A line of input is a turn; an empty one ends.

python examples/chat.py
python examples/chat.py --system "You are a patient teacher."
"""

from server import arguments, origin  # first: errors of the imports below are one line, too

# isort: split
import sys

import openai


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--system", metavar="TEXT", help="what goes before the first turn")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.base_url, api_key=options.api_key)
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]

    while True:
        print("> ", end="", flush=True)
        turn = sys.stdin.readline().strip()
        if not turn:
            return
        messages.append({"role": "user", "content": turn})
        answer = ""
        for chunk in client.chat.completions.create(
            model=options.model,
            messages=messages,
            max_tokens=options.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices:
                piece = chunk.choices[0].delta.content or ""
                print(piece, end="", flush=True)
                answer += piece
            else:  # the last chunk has no choice, but the usage
                print(f"\n  {origin(chunk.kvtier)}")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
