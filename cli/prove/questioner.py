"""`Questioner`: sends requests, one by one or concurrently, and collects their answers."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.evidence import Asked, Request
from kvtier.cli.prove.writing import PromptFormat

Note = Callable[[str, int, int], None]  # description, number of requests done, number of requests


class Questioner:
    """A sender of requests. It appends each request with its answer to *kept*, and calls *note* with the progress.

    If a request fails, its methods raise OSError or `Refused`, and do not send the remaining requests.
    """

    def __init__(self, kept: list[Asked], writing: PromptFormat, concurrency: int, note: Note) -> None:
        self._kept = kept
        self._writing = writing
        self._concurrency = concurrency
        self._note = note
        self._num_batches = 0

    def ask_each(self, what: str, requests: Sequence[Request]) -> list[Asked]:
        """Send requests one after the other. *what* describes them in the progress display."""
        asked: list[Asked] = []
        for request in requests:
            self._note(what, len(asked), len(requests))
            asked += self._keep([request], [self._answer(request)], is_alone=True)
        return asked

    def ask_at_once(self, what: str, requests: Sequence[Request]) -> list[Asked]:
        """Send all requests, up to *concurrency* at a time."""
        self._note(what, 0, len(requests))
        answers: list[Answer] = []
        pool = ThreadPoolExecutor(self._concurrency)
        try:
            for answer in pool.map(self._answer, requests):
                answers.append(answer)
                self._note(what, len(answers), len(requests))
        finally:
            pool.shutdown(cancel_futures=True)
        return self._keep(requests, answers, is_alone=False)

    def _answer(self, request: Request) -> Answer:
        return request.asker.ask(self._writing.write(request.pieces), request.salt, request.is_read)

    def _keep(self, requests: Sequence[Request], answers: Sequence[Answer], is_alone: bool) -> list[Asked]:
        batch, self._num_batches = self._num_batches, self._num_batches + 1
        asked = [Asked(*pair, batch, is_alone) for pair in zip(requests, answers, strict=True)]
        self._kept += asked
        return asked
