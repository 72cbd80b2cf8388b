"""The HTTP routes of the dashboard's data: the live stream, the history, and downloads of the history."""

import csv
import io
import math
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvtier.web.api_error import ApiError
from kvtier.web.connection import in_time, while_connected
from kvtier.web.dashboard.dashboard import Dashboard, plain
from kvtier.web.dashboard.history import Stretch
from kvtier.web.dashboard.stream import TooManyViewers
from kvtier.web.paths import DOWNLOADS, HISTORY, STREAM

DEFAULT_S = 600.0
_RETRY_S = 10
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

GroupOf = Callable[[Request], str | None]


class HistoryStretch(msgspec.Struct, frozen=True):
    """The dashboard's data of a period that begins at *start*, in seconds since the Unix epoch.

    Each column has one value for every *step_s* seconds. Unknown values are null.
    """

    step_s: int
    start: int
    rows: int
    columns: dict[str, list[float | None]]


class DashboardRoutes:
    """The handlers of a dashboard's routes. Owned by the event loop.

    Viewers of one group, such as a tenant, see the same data. *group_of* returns the group of a request's sender.
    """

    def __init__(self, dashboard: Dashboard, group_of: GroupOf) -> None:
        self._dashboard = dashboard
        self._group_of = group_of
        # Key and bytes of the last response, because many viewers request the same history at once.
        self._made: tuple[tuple[float, int, int], bytes] = ((0.0, 0, 0), b"")

    def routes(self) -> list[BaseRoute]:
        """Return the routes. They do not check access, so the server must do that first."""
        answers = (self._stream, self._history, self._csv, self._json)
        return [Route(path, answer) for path, answer in zip((STREAM, HISTORY, *DOWNLOADS), answers, strict=True)]

    async def _stream(self, request: Request) -> "_Watching":
        return _Watching(self._dashboard, self._group_of(request))

    async def _history(self, request: Request) -> Response:
        seconds, now = _range(request), self._dashboard.wall()
        history = self._dashboard.history
        key = (seconds, int(now), history.num_changes)
        if self._made[0] != key:
            self._made = (key, as_json(history.stretch(seconds, now)))
        return Response(self._made[1], headers=_HEADERS, media_type="application/json")

    async def _json(self, request: Request) -> Response:
        return self._file(as_json(self._stretch(request)), "application/json", "json")

    async def _csv(self, request: Request) -> Response:
        return self._file(as_csv(self._stretch(request)), "text/csv", "csv")

    def _stretch(self, request: Request) -> Stretch:
        return self._dashboard.history.stretch(_range(request), self._dashboard.wall())

    def _file(self, content: bytes, kind: str, ending: str) -> Response:
        at = datetime.fromtimestamp(self._dashboard.wall(), UTC).strftime("%Y%m%dT%H%M%SZ")
        named = {"Content-Disposition": f'attachment; filename="kvtier-{at}.{ending}"'}
        return Response(content, headers=_HEADERS | named, media_type=kind)


class _Watching(Response):
    """A response that streams events to one viewer, until the viewer disconnects or the server stops."""

    def __init__(self, dashboard: Dashboard, group: str | None) -> None:
        super().__init__(headers=_HEADERS | {"X-Accel-Buffering": "no"}, media_type="text/event-stream")
        self._dashboard = dashboard
        self._group = group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the dashboard's events to the viewer. Raise `ApiError` 503 if too many viewers are connected."""
        try:
            with self._dashboard.stream.viewer(self._group) as events:
                await while_connected(receive, self._send_all(events, in_time(send)))
        except TooManyViewers as error:
            headers = {"Retry-After": str(_RETRY_S)}
            raise ApiError(503, str(error), code="viewers", headers=headers) from None
        except (ClientDisconnect, TimeoutError):
            pass  # the viewer has disconnected or does not read, so its connection is closed

    async def _send_all(self, events: AsyncIterator[bytes], send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def as_json(stretch: Stretch) -> bytes:
    """Return rows of the history as JSON, column by column, without columns whose values are all unknown."""
    by_column = zip(stretch.columns, stretch.rows.T, strict=True)
    values = {column: plain(known) for column, known in by_column if np.isfinite(known).any()}
    answer = HistoryStretch(step_s=stretch.step_s, start=stretch.start, rows=len(stretch.rows), columns=values)
    return msgspec.json.encode(answer)


def as_csv(stretch: Stretch) -> bytes:
    """Return rows of the history as CSV with a header line, without rows whose values are all unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time", *stretch.columns])
    for at, row in zip(stretch.times, stretch.rows, strict=True):
        if np.isfinite(row).any():
            time = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            writer.writerow([time, *("" if value is None else f"{value:.6g}" for value in plain(row))])
    return text.getvalue().encode()


def _range(request: Request) -> float:
    text = request.query_params.get("range")
    try:
        seconds = DEFAULT_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 366 * 86_400:
        raise ApiError(400, f"range {(text or '')[:32]!r}: give a number of seconds, such as 600", param="range")
    return seconds
