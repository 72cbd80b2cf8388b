"""The page in a real browser, of real servers under load: what it shows, who it asks, and who can use it."""

import base64
import io
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import LARGE, SMALL, Browser, Seen
from served_config import configured
from serving import (
    DEADLINE_S,
    MODEL,
    Address,
    ServerInThread,
    chat_tokenizer,
    come_true,
    serving,
    serving_process,
    tables,
)
from sidecars import TOKEN, RunningSidecar, running_sidecar, small_config
from small_models import VOCAB, build
from state_models import build_states
from under_load import under_load
from vision_models import build_vision, picture

from kvtier.engine.model.paged_layout import layout_of
from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason, Tier

pytestmark = pytest.mark.long

SOURCES = ("device", "host", "disk", "recomputed")
KEY = "sk-ops-4444"
STARTED_BEFORE_S = 30  # that a server takes to start, and a row that the table leaves out
# Opens the table of numbers of each chart that is shown.
OPEN_ALL = """() => [...document.querySelectorAll('summary')]
  .filter((each) => each.offsetHeight > 0)
  .forEach((each) => each.click())"""
CUT_OFF = """() => [...document.querySelectorAll('h1, h2, h3, .jump a, .big, .legend button, .controls button')]
  .filter((each) => each.clientWidth > 0 && each.scrollWidth > each.clientWidth + 1)
  .map((each) => each.textContent)"""


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInThread]:
    """A server with a disk, small tiers and a document, that has served some prompts."""
    folder = tmp_path_factory.mktemp("busy")
    config = {**tables(60), "disk": {"path": str(folder / "store"), "capacity": "16MiB", "endurance": "600TB"}}
    with serving(build("llama"), config) as server:
        httpx.put(
            f"{server.url}/v1/kvtier/documents/report", json={"token_ids": prompt_of(99, 200)}, timeout=DEADLINE_S
        )
        for seed in (1, 2, 3, 4, 1, 2):
            server.complete(prompt_of(seed, 400), max_tokens=2)
        yield server


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def load(server: Address) -> AbstractContextManager[None]:
    """Return a context in which prompts come one after the other, some again."""
    return under_load(lambda number: server.complete(prompt_of(number % 7, 300), max_tokens=2))


def assert_clean(seen: Seen, server_port: int) -> None:
    assert seen.errors == []
    assert seen.hosts <= {f"127.0.0.1:{server_port}", "blob", "data"}


def count_of(text: str) -> int:
    return int(text.replace(",", ""))


def test_values_on_the_page_are_those_of_stats_after_load(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait_live()
        with load(busy):
            before = busy.get("/v1/kvtier/stats").json()["tokens"]["recomputed"]
            come_true(lambda: busy.get("/v1/kvtier/stats").json()["tokens"]["recomputed"] > before + 500)
        come_true(busy.is_at_rest)
        come_true(
            lambda: not _differences(seen, busy.get("/v1/kvtier/stats").json()), pause_s=0.2
        )  # spills go on for a while

        assert seen.page.locator("#slowest tbody tr").count() > 0
        assert seen.page.locator("#documents tbody tr").count() == 1
        assert_clean(seen, busy.port)


def _differences(seen: Seen, stats: Any) -> list[str]:
    """What the page shows that is not what /stats says."""
    said = {"all": f"{sum(stats['tokens'][source] for source in SOURCES):,} since the start"}
    said |= {f"reason.{reason}": f"{number:,}" for reason, number in stats["tokens"]["reasons"].items() if number}
    for tier, found in stats["cache"]["tiers"].items():
        said[f"tier.{tier}.evicted"] = f"{sum(found['evicted'].values()):,}"
        said[f"tier.{tier}.corrupt"] = f"{sum(found['corrupt'].values()):,}"
    shown = {name: seen.page.locator("#tiles").inner_text() if name == "all" else seen.numbers(name) for name in said}
    exact = {f"tier.{tier}.bytes": found["num_bytes"] for tier, found in stats["cache"]["tiers"].items()}
    exact |= {f"lane.{route}.bytes": moved["num_bytes"] for route, moved in stats["cache"]["routes"].items()}
    ratios = {
        f"what_if.{tier}.{size}": ratio for tier, sizes in stats["what_if"].items() for size, ratio in sizes.items()
    }
    return [
        *(name for name, text in said.items() if text not in shown[name]),
        *(name for name, number in exact.items() if seen.exact(name) != str(number)),
        *(name for name, ratio in ratios.items() if abs(_percent(seen.numbers(name)) - 100 * ratio) > 0.6),
    ]


def _percent(text: str) -> float:
    return float(text.replace("<", "").removesuffix("%"))


def test_a_requests_balance_adds_up_to_its_prompt(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait("() => document.querySelectorAll('#slowest tbody tr').length > 0")
        rows = [
            row.all_inner_texts()
            for row in (each.locator("td") for each in seen.page.locator("#slowest tbody tr").all())
        ]

    for row in rows:
        prompt, *sources = (count_of(text) for text in row[6:11])
        assert sum(sources) == prompt > 0


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(busy: ServerInThread, browser: Browser, scheme: str, size: tuple[int, int]) -> None:
    with browser.open(f"{busy.url}/dashboard", size, scheme, reduced_motion="reduce") as seen:
        seen.wait_live()
        seen.wait("() => document.querySelectorAll('#slowest tbody tr').length > 0")
        seen.page.evaluate(OPEN_ALL)

        assert seen.grave() == []
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert seen.page.evaluate(CUT_OFF) == []
        assert_clean(seen, busy.port)


def test_it_can_be_used_with_the_keyboard_alone(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait_live()
        focused = "document.activeElement.id || document.activeElement.tagName"
        reached = []
        for _ in range(12):
            seen.page.keyboard.press("Tab")
            reached.append(seen.page.evaluate(focused))
        assert {"pause", "csv", "json", "theme"} <= set(reached)
        assert any(name.startswith("range-") for name in reached)

        seen.page.locator("#pause").focus()
        seen.page.keyboard.press("Enter")
        seen.wait("() => document.getElementById('status').textContent.startsWith('paused')")
        seen.page.keyboard.press("Enter")
        seen.wait_live()

        seen.page.locator("#range-600").focus()
        seen.page.keyboard.press("ArrowRight")
        seen.wait("() => document.getElementById('range-7200').checked")

        button = seen.page.locator("#sources .legend button").first
        button.focus()
        seen.page.keyboard.press("Space")
        assert button.get_attribute("aria-pressed") == "false"

        seen.page.locator("#theme").focus()
        for expected in ("light", "dark", None):
            seen.page.keyboard.press("Enter")
            assert seen.page.evaluate("document.documentElement.dataset.theme ?? null") == expected
        assert_clean(seen, busy.port)


def test_a_link_at_the_top_leads_to_each_section(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait_live()
        links = seen.page.locator("#jump a")
        assert links.all_inner_texts() == ["Prompt tokens", "Requests", "Tiers", "Copies", "Health"]

        for number in range(links.count()):
            links.nth(number).focus()
            seen.page.keyboard.press("Enter")
            target = links.nth(number).get_attribute("href")
            seen.wait("(hash) => location.hash === hash", target)
            top = seen.page.locator(f"{target} h2").bounding_box()
            assert top is not None
            assert 0 <= top["y"] < LARGE[1]
        assert_clean(seen, busy.port)


def test_a_reason_leads_to_its_explanation(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait_live()
        seen.page.locator("#reasons a", has_text="never seen").click()
        seen.page.wait_for_url("**/dashboard/reasons#never_seen")

        assert "No earlier prompt had this prefix." in seen.page.locator("#never_seen").inner_text()
        assert seen.grave() == []
        seen.page.get_by_role("link", name="Back to the dashboard").click()
        seen.wait_live()
        assert_clean(seen, busy.port)


def test_a_server_without_a_remote_tier_has_a_page_without_that_word_and_without_our_own_words(
    busy: ServerInThread, browser: Browser
) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait("() => document.querySelectorAll('#slowest tbody tr').length > 0")
        text = seen.page.locator("body").inner_text().lower()

    for word in ("remote", "lane", "door", "spill", "nine of ten", "half are below", "what is"):
        assert word not in text, word


def test_a_server_of_a_model_with_states_counts_them_and_has_no_images(browser: Browser) -> None:
    model = build_states("FalconH1")
    device = {"capacity": layout_of(model, 16).capacity_for(60, 6), "block_size": 16}
    with serving(model, tables() | {"device": device}) as server, browser.open(f"{server.url}/dashboard") as seen:
        server.complete(prompt_of(1, 300), max_tokens=2)

        def states() -> int:
            return server.ask(lambda core: core.statistics.cache.tiers[Tier.DEVICE].num_states)

        come_true(lambda: seen.exact("tier.device.states") == str(states()), pause_s=0.2)
        assert states() >= 2
        assert not seen.page.locator("#images").is_visible()


def test_a_server_that_sees_images_shows_how_often_the_encoder_ran(tmp_path: Path, browser: Browser) -> None:
    model = build_vision("qwen3_vl")
    for part in model.parts():
        part.save_pretrained(tmp_path)
    image = io.BytesIO()
    picture(1, 96, 80).save(image, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    with (
        serving(str(tmp_path), tables() | {"images": {"max_pixels": 40_000}}, tokenizer=model.tokenizer) as server,
        browser.open(f"{server.url}/dashboard") as seen,
    ):
        for _ in range(2):
            server.openai().chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=2
            )

        rows = seen.page.locator("#images tbody tr")
        come_true(lambda: rows.count() > 0 and rows.first.locator("td").last.inner_text() == "1", pause_s=0.2)


def test_a_server_that_has_just_started_is_shown_without_the_blank_before(browser: Browser) -> None:
    def seconds_shown() -> int:
        times = [text.split(" ")[1] for text in seen.page.locator("#sources tbody th").all_inner_texts()]
        newest, oldest = (
            sum(int(part) * 60**power for power, part in enumerate(text.split(":")[::-1]))
            for text in (times[0], times[-1])
        )
        return (newest - oldest) % 86_400

    with serving(build("llama"), tables()) as server, browser.open(f"{server.url}/dashboard") as seen:
        began = time.monotonic()
        server.complete(prompt_of(1, 100), max_tokens=1)
        seen.wait("() => document.getElementById('sources')?.offsetHeight > 0")
        seen.page.locator("#sources summary").click()
        seen.wait("() => document.querySelectorAll('#sources tbody tr').length > 0")

        assert seconds_shown() <= max(60, time.monotonic() - began + STARTED_BEFORE_S)


def test_a_table_that_is_wider_than_a_phone_says_that_it_scrolls(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard", SMALL) as seen:
        seen.wait("() => document.querySelectorAll('#slowest tbody tr').length > 0")
        seen.wait("() => document.querySelector('#slowest .hint').offsetHeight > 0")
        seen.page.locator("#slowest .scroll").evaluate("(each) => { each.scrollLeft = each.scrollWidth; }")

        name = seen.page.locator("#slowest tbody th").first.bounding_box()
        assert name is not None
        assert 0 <= name["x"] < SMALL[0] / 2  # the request's id stays in sight
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= SMALL[0]


def test_the_page_names_the_host_the_start_and_the_time_zone(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard", timezone_id="Asia/Tokyo") as seen:
        seen.wait_live()
        about = seen.page.locator("#server-about").inner_text()

    assert f"on {socket.gethostname()} · up since " in about
    assert about.endswith("times in Asia/Tokyo")


def test_a_paused_page_stays_as_it_is_and_goes_on(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait_live()
        seen.page.locator("#pause").click()
        shown = seen.page.locator("#tiles").inner_text()
        busy.complete(prompt_of(77, 333), max_tokens=1)
        at = seen.page.evaluate("document.documentElement.dataset.at")
        seen.wait("(at) => Number(document.documentElement.dataset.at) > Number(at) + 1.5", at)  # ticks have come
        assert seen.page.locator("#tiles").inner_text() == shown

        seen.page.locator("#pause").click()
        seen.wait("(shown) => document.getElementById('tiles').innerText !== shown", shown)
        assert_clean(seen, busy.port)


def test_a_stretch_that_is_drawn_over_is_looked_at_more_closely(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait_live()
        seen.wait("() => document.querySelector('#sources canvas') !== null")
        box = seen.page.locator("#sources .u-over").bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        seen.page.mouse.move(box["x"] + box["width"] * 0.5, middle)
        seen.page.mouse.down()
        seen.page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=5)
        seen.page.mouse.up()

        seen.wait("() => !document.getElementById('unzoom').hidden")
        seen.page.locator("#sources summary").click()
        seen.wait("() => document.querySelectorAll('#sources tbody tr').length > 0")
        seen.page.locator("#unzoom").click()
        seen.wait("() => document.getElementById('unzoom').hidden")
        assert_clean(seen, busy.port)


def test_what_is_shown_can_be_saved(busy: ServerInThread, browser: Browser) -> None:
    with browser.open(f"{busy.url}/dashboard") as seen:
        seen.wait_live()
        for kind in ("csv", "json"):
            with seen.page.expect_download() as coming:
                seen.page.locator(f"#{kind}").click()
            assert re.fullmatch(rf"kvtier-\d{{8}}T\d{{6}}Z\.{kind}", coming.value.suggested_filename)
            assert "tokens.device" in Path(coming.value.path()).read_text()
        assert_clean(seen, busy.port)


def test_with_keys_the_page_asks_for_one(browser: Browser) -> None:
    config = tables(metrics_tenants=["ops"])
    with serving(build("llama"), config, {KEY: "ops", "sk-ann-1111": "ann"}) as server:
        with browser.open(f"{server.url}/dashboard") as seen:
            for key, answer in (("sk-wrong-1", "unknown"), ("sk-ann-1111", "metrics_tenants")):
                seen.page.locator("#key").fill(key)
                seen.page.keyboard.press("Enter")
                seen.wait("(text) => document.body.innerText.includes(text)", answer)
                if key == "sk-wrong-1":
                    assert seen.grave() == []
        with browser.open(f"{server.url}/dashboard") as seen:
            seen.page.locator("#key").fill(KEY)
            seen.page.keyboard.press("Enter")
            seen.wait_live()
            assert KEY not in seen.page.url
            seen.page.reload()
            seen.wait_live()  # the key is kept in the tab


def test_a_page_without_any_prompt_says_so(browser: Browser) -> None:
    with serving(build("llama"), tables()) as server, browser.open(f"{server.url}/dashboard") as seen:
        nothing = ("no prompts in this time range", "no tokens computed yet", "no evictions in this time range")
        for said in (*nothing, "no request has finished yet"):
            seen.wait("(text) => document.body.innerText.includes(text)", said)
        text = seen.page.locator("main").inner_text()

        assert "NaN" not in text
        assert "undefined" not in text
        assert seen.page.locator("#what-if").is_hidden()
        assert seen.grave() == []
        assert_clean(seen, server.port)


def test_names_are_text_whatever_is_in_them(browser: Browser) -> None:
    name = "<img src=x onerror=alert(1)>"
    with serving(build("llama"), tables(tenant_isolation="off"), {KEY: name}) as server:
        server.complete(prompt_of(5, 300), KEY, max_tokens=1)
        with browser.open(f"{server.url}/dashboard") as seen:
            seen.page.locator("#key").fill(KEY)
            seen.page.keyboard.press("Enter")
            seen.wait("(name) => document.getElementById('tenants')?.innerText.includes(name)", name)
            assert seen.page.locator("main img").count() == 0


def test_a_sidecars_page_shows_what_its_stats_say(browser: Browser, tmp_path: Path) -> None:
    with running_sidecar(small_config(tmp_path / "store", http={"port": 0, "token": TOKEN})) as running:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        _fill(running)
        pin = {"model": "m", "token_ids": [1000 + number for number in range(48)], "seconds": 600}
        pinned = "pin " + running.post("/v1/kvtier/pin", json=pin, headers=headers).json()["pin"]
        with browser.open(f"{running.url}/dashboard") as seen:
            seen.page.locator("#key").fill(TOKEN)
            seen.page.keyboard.press("Enter")
            seen.wait_live()
            stats = running.get("/v1/kvtier/stats", headers=headers).json()
            seen.wait("() => document.querySelectorAll('#engines tbody tr').length === 1")

            for name, key in (("asked", "num_asked"), ("promised", "num_promised"), ("loaded", "num_loaded")):
                assert count_of(seen.numbers(f"endpoint.open.{name}")) == stats["endpoints"][0][key]
            assert pinned in seen.page.locator("#pins").inner_text()
            assert "late 2" in seen.page.locator("#endpoints").inner_text()
            assert count_of(seen.numbers("reason.never_seen")) == 90
            cell = seen.page.locator('[data-value="tier.host.bytes"]')
            assert cell.get_attribute("data-exact") == str(stats["tiers"]["host"]["num_bytes"])
            assert "instance <b>7</b>" in seen.page.locator("#engines").inner_text()
            assert seen.page.locator("#documents").is_hidden()
            assert seen.grave() == []
            assert seen.hosts == {f"127.0.0.1:{running.port}"}


def test_a_sidecar_without_an_engine_shows_how_to_attach_one(browser: Browser) -> None:
    with running_sidecar(small_config()) as running, browser.open(f"{running.url}/dashboard") as seen:
        seen.wait("() => document.getElementById('attach')?.offsetHeight > 0")
        text = seen.page.locator("#attach").inner_text()
        assert 0 < text.index("KVTierConnector") < text.index("LMCacheMPConnector")
        assert seen.grave() == []

        _fill(running)
        seen.wait("() => document.getElementById('engines')?.offsetHeight > 0")
        assert seen.page.locator("#attach").is_hidden()


def test_a_sidecar_without_a_token_lets_its_own_page_ask(browser: Browser) -> None:
    with running_sidecar(small_config()) as running, browser.open(f"{running.url}/dashboard") as seen:
        seen.wait_live()
        assert_clean(seen, running.port)


def _fill(running: RunningSidecar) -> None:
    layout = running.store(1, 6)
    tokens = TokenBalance(host=512, recomputed=90, reasons={Reason.NEVER_SEEN: 90})
    running.endpoint.counted = ConnectorCounts(
        "open", num_asked=8, num_promised=6, num_loaded=5, lost={"late": 2}, tokens=tokens
    )
    running.endpoint.attached = [AttachedClient("instance <b>7</b>", running.sidecar.now() - 60.0, layout)]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.slow), pytest.param(signal.SIGKILL, id="kill")]
)
def test_the_history_survives_a_restart(browser: Browser, tmp_path: Path, number: int) -> None:
    model = tmp_path / "model"
    build("llama").save_pretrained(model)
    chat_tokenizer().save_pretrained(model)
    with serving_process(tmp_path, model, configured(tmp_path)) as first:
        first.complete(prompt_of(1, 400), max_tokens=1)
        come_true(lambda: _computed(first) >= 399, pause_s=0.2)
        file = tmp_path / "store-history"
        written_at = file.stat().st_mtime
        come_true(lambda: file.stat().st_mtime > written_at, pause_s=0.2)  # every ten seconds
        first.signal(number)
        first.wait()
    with (
        serving_process(tmp_path, model, configured(tmp_path)) as second,
        browser.open(f"{second.url}/dashboard") as seen,
    ):
        seen.wait_live()
        seen.wait("() => document.querySelector('#tiles').innerText.includes('tokens in this time')")
        assert "0 since the start" in seen.page.locator("#tiles").inner_text()
        assert _computed(second) == pytest.approx(400, abs=2)
        starts = second.get("/dashboard/history?range=600").json()["columns"]["process.start"]
        assert sum(value or 0 for value in starts) == 2
        assert_clean(seen, second.port)


def _computed(server: Address) -> float:
    """Tokens that the history says were computed."""
    history = server.get("/dashboard/history?range=600").json()
    return sum(value or 0 for value in history["columns"].get("tokens.recomputed", []))
