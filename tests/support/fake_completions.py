"""A server of OpenAI's completions whose model is arithmetic, and whose KV cache may be wrong as real ones are.

What it computes of a block stands for the block's keys and values: a digest of the weights and of all tokens up to its
end. An answer hangs on those of all blocks, so one that is wrong gives another answer.
"""

import json
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvtier.cli.prove.writing import WORDS

BLOCK_SIZE = 16
FIRST_ID = 3
SECONDS_PER_TOKEN = 0.001
NUM_LISTED = 8
POLL_S = 0.01  # until it sees that it is to end


@dataclass(frozen=True)
class Block:
    """A full block of a prompt, and whose it is."""

    weights: str
    model: str
    salt: str | None
    tokens: tuple[int, ...]  # of the prompt, from its beginning to the block's end

    @property
    def name(self) -> Hashable:
        """What a right cache calls it."""
        return self

    @property
    def content(self) -> bytes:
        """What computing gives."""
        return sha256(repr((self.weights, self.model, self.tokens)).encode()).digest()


@dataclass
class FakeServer:
    """Answers at `url`. At `/reset` it forgets its *store*; *lower*, which may be another's too, has what is in it, at
    once or not before that (*spills_late*). What is wrong with it is in *name_of*, *lower_name_of*,
    *read* and *compute*. The tests say when it `is_crowded`."""

    models: tuple[str, ...] = ("small",)  # the first one is the model, the others its adapters
    weights: str = "weights"
    store: dict[Hashable, bytes] = field(default_factory=dict)
    lower: dict[Hashable, bytes] = field(default_factory=dict)
    name_of: Callable[[Block], Hashable] = lambda block: block.name
    lower_name_of: Callable[[Block], Hashable] = lambda block: block.name
    read: Callable[[bytes, "FakeServer"], bytes] = lambda content, server: content
    compute: Callable[[bytes, "FakeServer"], bytes] = lambda content, server: content
    caches: bool = True
    spills_late: bool = False
    heeds: tuple[str, ...] = ("cache_salt",)  # of cache_salt and cache_prompt
    takes_ids: bool = True
    tells_ids: bool = False
    tells_cached: bool = True
    tells_logprobs: bool = True
    max_model_len: int | None = 4096
    noise: float = 0.0  # of a log probability, anew with each token
    noisy: float = 1.0  # the share of answers that have it
    hangs_on_prompt: bool = True
    fails_after: int | None = None  # completions
    refuses_once_there: Path | None = None  # twice, as a server does that is loading
    num_refused: int = 0
    key: str | None = None
    url: str = ""
    now: float = 0.0
    num_asked: int = 0
    is_crowded: bool = False
    unspilled: dict[Hashable, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    chance: random.Random = field(default_factory=lambda: random.Random(0))  # the same noise in each run

    def clock(self) -> float:
        """Seconds; each computed token takes one of a thousand."""
        return self.now

    def complete(self, body: dict) -> Iterator[dict]:
        """The events of an answer."""
        tokens = self._tokens(body["prompt"])
        contents, num_cached = self._contents(body, tokens)
        self.now += SECONDS_PER_TOKEN * (len(tokens) - num_cached)
        noise = self.noise if self.chance.random() < self.noisy else 0.0
        for _ in range(body["max_tokens"]):
            top = self._top(tokens, contents, noise) if self.hangs_on_prompt else self._top(tokens[-4:], [], noise)
            best = max(top, key=lambda token: top[token])
            tokens = (*tokens, best)
            if len(tokens) % BLOCK_SIZE == 0:
                contents.append(Block(self.weights, body["model"], None, tokens).content)
            logprobs = None
            if self.tells_logprobs and "logprobs" in body:
                has_ids = self.tells_ids and body.get("return_tokens_as_token_ids", False)
                names = {token: f"token_id:{token}" if has_ids else text_of(token) for token in top}
                listed = {names[token]: logprob for token, logprob in top.items()}
                logprobs = {"tokens": [names[best]], "token_logprobs": [top[best]], "top_logprobs": [listed]}
            yield {"choices": [{"text": text_of(best), "logprobs": logprobs, "finish_reason": None}]}
        usage: dict = {"prompt_tokens": len(tokens) - body["max_tokens"]}
        if self.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        yield {"choices": [], "usage": usage}

    def reset(self) -> None:
        """Forget what is on the device."""
        with self.lock:
            self.lower.update(self.unspilled)
            self.store.clear()

    def refusal(self, body: dict) -> tuple[int, str] | None:
        """With which status and why such a body is refused."""
        with self.lock:
            self.num_asked += 1
        if self.fails_after is not None and self.num_asked > self.fails_after:
            return 500, "the engine has ended"
        if self.refuses_once_there and self.refuses_once_there.exists() and self.num_refused < 2:
            self.num_refused += 1
            return 503, "the model is loading"
        if body["model"] not in self.models:
            return 400, f"there is no model {body['model']}"
        if not isinstance(body["prompt"], str) and not self.takes_ids:
            return 400, "prompt: give a text"
        if len(self._tokens(body["prompt"])) + body["max_tokens"] > (self.max_model_len or 1 << 30):
            return 400, "the prompt is too long"
        return None

    def _tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(FIRST_ID + WORDS.index(word) for word in prompt.split())
        return tuple(prompt)

    def _contents(self, body: dict, tokens: tuple[int, ...]) -> tuple[list[bytes], int]:
        """What all full blocks have in them, and how many tokens came from the cache."""
        salt = body.get("cache_salt") if "cache_salt" in self.heeds else None
        is_read = "cache_prompt" not in self.heeds or body.get("cache_prompt", True)
        contents: list[bytes] = []
        num_found, is_prefix = 0, self.caches and is_read
        with self.lock:
            for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
                block = Block(self.weights, body["model"], salt, tokens[:end])
                name, lower_name = self.name_of(block), self.lower_name_of(block)
                found = self.store.get(name) or self.lower.get(lower_name)
                if is_prefix and found is not None and end < len(tokens):  # the last token is always computed
                    contents.append(self.read(found, self))
                    num_found += 1
                else:
                    is_prefix = False
                    contents.append(self.compute(block.content, self))
                if self.caches:
                    below = self.unspilled if self.spills_late else self.lower
                    self.store[name] = below[lower_name] = contents[-1]
        return contents, num_found * BLOCK_SIZE

    def _top(self, tokens: tuple[int, ...], contents: list[bytes], noise: float) -> dict[int, float]:
        """The likeliest tokens behind *tokens*, of which the first are those of the blocks with *contents*."""
        rest = repr(tokens[len(contents) * BLOCK_SIZE :]).encode()
        source = random.Random(sha256(b"".join(contents) + rest).digest())
        tokens = source.sample(range(FIRST_ID, FIRST_ID + len(WORDS)), NUM_LISTED)
        return {token: -source.uniform(0.1, 6.0) + self.chance.uniform(-noise, noise) for token in tokens}


def text_of(token: int) -> str:
    """A token's text, which makes the same token of the prompt that it is put behind."""
    return " " + WORDS[(token - FIRST_ID) % len(WORDS)]


@contextmanager
def fake_server(**options: object) -> Iterator[FakeServer]:
    """One that listens, on a free port."""
    server = FakeServer(**options)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                self._answer(401, {"error": {"message": "give a key"}})
                return
            models = [
                {"id": name, "parent": server.models[0] if number else None, "max_model_len": server.max_model_len}
                for number, name in enumerate(server.models)
            ]
            self._answer(200, {"data": models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/reset":
                server.reset()
                self._answer(200, {})
            elif self.path != "/v1/completions":
                self._answer(404, {"error": {"message": "there is no such path"}})
            elif (refusal := server.refusal(body)) is not None:
                self._answer(refusal[0], {"error": {"message": refusal[1]}})
            else:
                self._begin(200, "text/event-stream")
                for event in server.complete(body):
                    event["id"] = "cmpl-\x85\u2028"  # ends a line for Python, and none of a stream of events
                    self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

        def _answer(self, status: int, content: dict) -> None:
            self._begin(status, "application/json")
            self.wfile.write(json.dumps(content).encode())

        def _begin(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(POLL_S,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
