"""Ten users ask about one document at once. Together they compute most of it only once.

python examples/ten_users.py report.txt "Who wrote it?" "What does it cost?"
"""

from server import arguments, origin, read_text  # first: errors of the imports below are one line, too

# isort: split
import asyncio
from itertools import cycle, islice
from pathlib import Path

import openai


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--users", type=int, default=10, metavar="N", help="(%(default)s)")
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("questions", nargs="+", metavar="question", help="the users take turns with these")
    options = parser.parse_args()
    document = read_text(options.document)

    async with openai.AsyncOpenAI(base_url=options.base_url, api_key=options.api_key) as client:

        async def ask(user: int, question: str) -> None:
            done = await client.chat.completions.create(
                model=options.model,
                messages=[{"role": "user", "content": f"{document}\n\n{question}"}],
                max_tokens=options.max_tokens,
                temperature=0,
            )
            print(f"user {user}: {question}\n  {done.choices[0].message.content}\n  {origin(done.kvtier)}")

        questions = islice(cycle(options.questions), options.users)
        await asyncio.gather(*(ask(user, question) for user, question in enumerate(questions, start=1)))


if __name__ == "__main__":
    asyncio.run(main())
