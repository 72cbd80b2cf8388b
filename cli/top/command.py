"""The loop of `kvtier top`: reads the state of a server or sidecar over HTTP, and shows it until `q` is pressed."""

import http.client
import json
import os
import re
import select
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvtier.cli.top.server_view import ServerView, ServerViews
from kvtier.cli.top.sidecar_view import SidecarView
from kvtier.cli.top.sidecar_view import rendered as rendered_sidecar
from kvtier.cli.user_input import token_of
from kvtier.engine.config import is_loopback

_ANSWER_S = 5.0
_MAX_BYTES = 16 << 20  # limit on a response
_MAX_MESSAGE = 200  # characters of a server's error message
_OTHER_WIDTH = 110  # width, in columns, of output that does not go to a terminal
_KEY = re.compile(r"[!-~]+")  # characters that a header can have


class NoAnswer(RuntimeError):
    """An error for a server that could not be queried. The message says why and what to do."""


class _NoRoute(NoAnswer):
    """An error for a server that has no such route."""


def top(url: str, token_file: Path | None, interval_s: float | None) -> int:
    """Show the state of the server or sidecar at *url*, and return the exit status.

    The view is updated every *interval_s* seconds until `q` or Ctrl-C, or shown once if *interval_s* is None. Raises
    `NoAnswer` if the server does not answer the first query. If a later query fails, the view says so.
    """
    watched = Watched(url, _token(token_file))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_OTHER_WIDTH)
    shown = watched.look()
    if interval_s is None:
        console.print(shown)
        return 0
    with (
        _keys() as is_quit,
        Live(shown, console=console, screen=True, auto_refresh=False) as live,
    ):
        while not is_quit(interval_s):
            try:
                shown = latest = watched.look()
            except NoAnswer as error:
                latest = Group(Text(f"no answer: {error}", style="bold red"), shown)
            live.update(latest, refresh=True)
    return 0


class Watched:
    """The server or sidecar at one URL. `look` queries it, and compares its state with earlier states."""

    def __init__(self, url: str, token: str | None) -> None:
        """Create it without a query. Raises ValueError if *url* is not the URL of a server."""
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # unclosed brackets, or a port out of range
            parts, is_address = None, False
        if parts is None or not is_address:
            raise ValueError(f"{url}: is not a URL; write http://HOST:PORT")
        if parts.username is not None:  # credentials in the URL are not sent, and messages must not repeat them
            raise ValueError("the URL contains a user name or password; give only the address, and use --token-file")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._token = token
        self._server = ServerViews()
        self._sidecar: SidecarView | None = None

    def look(self) -> RenderableType:
        """Query the state, and return what to display.

        Raises `NoAnswer` if there is no answer, or not one of a kvtier server or sidecar of this version.
        """
        try:
            stats = self._get("stats")
            if "cache" in stats:
                return self._server.rendered(ServerView(self._url, self._model(), stats, time.monotonic()))
            clients, leases = self._get("clients")["clients"], self._get("leases")["leases"]
            before, self._sidecar = self._sidecar, SidecarView(stats, clients, leases, time.monotonic())
            return rendered_sidecar(self._sidecar, before)
        except (_NoRoute, KeyError, TypeError, AttributeError, ValueError):
            raise NoAnswer(
                f"{self._url}: is not a kvtier server or sidecar, or has another version of kvtier; give the address "
                "of one of this version"
            ) from None

    def _get(self, what: str) -> Any:
        return _answer(f"{self._url}/v1/kvtier/{what}", self._token)

    def _model(self) -> str:
        return str(_answer(f"{self._url}/v1/models", self._token)["data"][0]["id"])


def _token(file: Path | None) -> str | None:
    token = os.environ.get("KVTIER_API_KEY") if file is None else token_of(str(file))
    if token and not _KEY.fullmatch(token):  # http.client's error would quote the token
        where = "KVTIER_API_KEY" if file is None else f"--token-file {file}"
        raise ValueError(f"{where}: the token has a space or another invalid character; give only the token")
    return token or None


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Return a function that waits for a number of seconds, or until `q` is pressed, and returns whether it was."""
    if not sys.stdin.isatty():
        yield _wait_without_keys
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)  # keys arrive at once and are not displayed; Ctrl-C still interrupts
    try:
        yield lambda seconds: _is_quit_pressed(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _wait_without_keys(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _is_quit_pressed(terminal: int, seconds: float) -> bool:
    give_up_at = time.monotonic() + seconds
    while (left := give_up_at - time.monotonic()) > 0:
        if not select.select([terminal], [], [], left)[0]:
            return False
        keys = os.read(terminal, 64)
        if not keys or b"q" in keys.lower():  # nothing to read: the terminal is gone
            return True
    return False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that makes redirects an error, because following one would send the token to another server."""

    def redirect_request(self, *_: object) -> None:
        """Return None, so that the redirect is not followed."""


def _answer(url: str, token: str | None) -> Any:
    request = urllib.request.Request(url, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    is_own = is_loopback(urlsplit(url).hostname or "")
    # Use no proxy for a server on this machine, because the proxy would look for the server on the proxy's machine.
    opener = urllib.request.build_opener(_NoRedirects, *([urllib.request.ProxyHandler({})] if is_own else []))
    try:
        with opener.open(request, timeout=_ANSWER_S) as reply:
            return json.loads(reply.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise NoAnswer(f"{url}: the server needs a key; give --token-file FILE or set KVTIER_API_KEY") from None
        kind = _NoRoute if error.code == 404 else NoAnswer
        raise kind(f"{url}: {_message(error)}") from None
    except urllib.error.URLError as error:
        why = getattr(error.reason, "strerror", None) or error.reason
        raise NoAnswer(f"{url}: {why}; is the server or sidecar running, and is this its HTTP port?") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(f"{url}: {error or type(error).__name__}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        message = " ".join(str(json.loads(error.read(_MAX_BYTES))["error"]["message"]).split())
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
