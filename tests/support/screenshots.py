"""Takes the screenshots of the dashboard in docs/images/, of a real server and a real sidecar that have data.

Run it in the repository's root: `PYTHONPATH=tests/support python tests/support/screenshots.py`. It takes about three
minutes. It needs Chromium and Playwright.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from browser import LARGE, SMALL, Browser, browsing
from serving import DEADLINE_S, Address, ServerInThread, come_true, serving, tables
from sidecars import running_sidecar, small_config
from small_models import VOCAB, build
from under_load import under_load

from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason

IMAGES = Path(__file__).parents[2] / "docs" / "images"
NUM_DOCUMENTS = 9  # more than the device and the host tier hold
NUM_USERS = 3
PHONE, DESK = (SMALL[0], 1500), (LARGE[0], 1290)
EXPECTED_CARDS = ("sources", "ttft", "token_gap", "what-if", "slowest", "documents", "disk")


def main() -> None:
    """Take the screenshots."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--folder", type=Path, default=IMAGES, help="where the images go (default: docs/images)")
    arguments.add_argument("--load-s", type=float, default=75.0, help="seconds of load before the first screenshot")
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        with busy_server(Path(folder), options.load_s) as server:
            for scheme in ("light", "dark"):
                take(browser, server.url, options.folder / f"dashboard-{scheme}.png", DESK, scheme)
            take(browser, server.url, options.folder / "dashboard-phone.png", PHONE, "light")
        with busy_sidecar(Path(folder)) as url:
            take(browser, url, options.folder / "dashboard-sidecar.png", DESK, "light", ("sources", "engines"))
        with running_sidecar(small_config()) as empty:
            take(browser, empty.url, options.folder / "dashboard-attach.png", DESK, "light", ("attach",))


def take(
    browser: Browser,
    url: str,
    file: Path,
    size: tuple[int, int],
    scheme: str,
    cards: tuple[str, ...] = EXPECTED_CARDS,
) -> None:
    """Save a screenshot of the beginning of the page at *url*, once all *cards* are shown."""
    with browser.open(f"{url}/dashboard", size, scheme, reduced_motion="reduce") as seen:
        seen.wait_live()
        for card in cards:
            seen.wait("(id) => document.getElementById(id)?.offsetHeight > 0", card)
        seen.page.screenshot(path=file)
    print(f"{file}: {file.stat().st_size >> 10} kB")


@contextmanager
def busy_server(folder: Path, load_s: float) -> Iterator[ServerInThread]:
    """A server with all local tiers under load, whose history has a restart."""
    config = {
        **tables(60, max_queued=64),
        "host": {"capacity": 2 * 60 * 16 * 1024},
        "disk": {"path": str(folder / "store"), "capacity": "16MiB", "endurance": "600TB"},
    }
    with serving(build("llama"), config) as server, users(server):
        time.sleep(load_s / 3)
    with serving(build("llama"), config) as server:
        for name, seed in (("annual-report", 1), ("handbook", 2)):
            tokens = {"token_ids": prompt_of(seed, 200)}
            httpx.put(f"{server.url}/v1/kvtier/documents/{name}", json=tokens, timeout=DEADLINE_S)
        with users(server):
            time.sleep(2 * load_s / 3)
            yield server


@contextmanager
def users(server: Address) -> Iterator[None]:
    """Several users who ask about documents, and one who makes mistakes."""
    with ExitStack() as stack:
        for user in range(NUM_USERS):
            stack.enter_context(under_load(lambda number, user=user: ask(server, user, number)))
        stack.enter_context(under_load(lambda number: mistake(server)))
        yield


def ask(server: Address, user: int, number: int) -> None:
    rng = random.Random(user * 1_000_003 + number)
    document = min(rng.randrange(NUM_DOCUMENTS), rng.randrange(NUM_DOCUMENTS))
    server.complete([*prompt_of(document, 240), *prompt_of(rng.randrange(10**6), 24)], max_tokens=12)
    time.sleep(rng.random())


def mistake(server: Address) -> None:
    server.get("/v1/no-such-route")
    time.sleep(2.0)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


@contextmanager
def busy_sidecar(folder: Path) -> Iterator[str]:
    """The address of a sidecar with an engine and chunks in its tiers."""
    with running_sidecar(small_config(folder / "sidecar")) as running:
        come_true(lambda: "clients" in running.get("/dashboard/history?range=600").json()["columns"])
        for document in range(4):
            layout = running.store(document, 6)
        running.endpoint.attached = [AttachedClient("vllm 4711", running.sidecar.now() - 60.0, layout)]
        for second in range(20):
            tokens = TokenBalance(
                host=512 * second, disk=128 * second, recomputed=96 * second, reasons={Reason.NEVER_SEEN: 96 * second}
            )
            running.endpoint.counted = ConnectorCounts(
                "lmcache", num_asked=8 * second, num_promised=6 * second, num_loaded=5 * second, tokens=tokens
            )
            time.sleep(1.0)
        yield running.url


if __name__ == "__main__":
    main()
