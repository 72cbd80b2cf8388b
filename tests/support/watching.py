"""A viewer of a dashboard's live stream, as a program."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from plain_http import NO_TLS
from waiting import DEADLINE_S

from kvtier.web.paths import STREAM


@contextmanager
def watching(url: str, key: str | None = None) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of the live stream of the server at *url*: name and content."""

    def events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", url + STREAM, timeout=DEADLINE_S, headers=headers, verify=NO_TLS) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events(answer)
