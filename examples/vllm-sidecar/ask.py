"""Asks a vLLM server about a long text, and prints which tier the prompt's tokens came from.

./serve.sh Qwen/Qwen3-0.6B
python ask.py report.txt "Who wrote it?" "What does it cost?"
"""

import argparse
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

METRIC = re.compile(r'^vllm:prompt_tokens_(?:cached_)?by_source_total\{.*?source="(\w+)".*?\} (\S+)$', re.MULTILINE)
TOLD = {"device": "device", "host": "host", "disk": "disk", "local_compute": "computed"}


def main() -> None:
    """Ask each question, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file")
    parser.add_argument("questions", nargs="+", metavar="QUESTION")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="maximum answer length (%(default)s)")
    options = parser.parse_args()
    try:
        ask(options)
    except UnicodeDecodeError:
        raise SystemExit(f"{options.text}: this is not a text file in UTF-8; give a text file") from None
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the server answered {error.code}: {error.read().decode(errors='replace')[:300]}") from None
    except urllib.error.URLError as error:
        raise SystemExit(
            f"no server answers at {options.url} ({error.reason}); start one with ./serve.sh MODEL"
        ) from None
    except OSError as error:
        raise SystemExit(f"{options.text}: {error.strerror}") from None


def ask(options: argparse.Namespace) -> None:
    """Ask each question of the command line, and print its answer."""
    model = json.loads(get(f"{options.url}/v1/models"))["data"][0]["id"]
    text = options.text.read_text(encoding="utf-8")
    for question in options.questions:
        asked = {"model": model, "prompt": f"{text}\n\nQuestion: {question}\nAnswer:", "temperature": 0}
        before = sources(options.url)
        asked_at = time.perf_counter()
        post(f"{options.url}/v1/completions", {**asked, "max_tokens": 1})
        ttft_s = time.perf_counter() - asked_at
        origin = told(before, sources(options.url))
        answer = post(f"{options.url}/v1/completions", {**asked, "max_tokens": options.max_tokens})
        print(f"{question}\n{answer['choices'][0]['text'].strip()}\n[{origin}; first token after {ttft_s:.2f} s]\n")


def sources(url: str) -> dict[str, float]:
    """Return vLLM's counts of prompt tokens, by the source that they came from."""
    return {source: float(count) for source, count in METRIC.findall(get(f"{url}/metrics"))}


def told(before: dict[str, float], after: dict[str, float]) -> str:
    """Return in words how the counts grew between *before* and *after*."""
    counts = {word: int(after.get(source, 0) - before.get(source, 0)) for source, word in TOLD.items()}
    return ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)


def get(url: str) -> str:
    """Return the text at *url*."""
    with urllib.request.urlopen(url, timeout=600) as answer:
        return str(answer.read().decode())


def post(url: str, body: dict[str, object]) -> dict:
    """Send *body* as JSON, and return the JSON of the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
