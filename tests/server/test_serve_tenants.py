"""Keys and tenants: which requests are let in, and which requests share cached blocks."""

import hashlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import openai
import pytest
from serving import BLOCK_BYTES, MODEL, ServerInThread, come_true, serving, tables
from small_models import VOCAB, build

from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import Tier
from kvtier.web.api_keys import ApiKeys, effective_salt

ANN, ANN_TOO, BOB, OPS = "sk-ann-1111", "sk-ann-2222", "sk-bob-3333", "sk-ops-4444"
KEYS = {ANN: "ann", f"sha256:{hashlib.sha256(ANN_TOO.encode()).hexdigest()}": "ann", BOB: "bob", OPS: "ops"}
HOST_QUOTA = 20 * BLOCK_BYTES


@pytest.fixture(scope="module")
def strict() -> Iterator[ServerInThread]:
    config = {**tables(metrics_tenants=["ops"]), "tenants": {"bob": {"host": HOST_QUOTA}, "ann": {"host": "1GiB"}}}
    with serving(build("llama"), config, KEYS) as address:
        yield address


@pytest.fixture(scope="module")
def sharing() -> Iterator[ServerInThread]:
    with serving(build("llama"), tables(tenant_isolation="off"), KEYS) as address:
        yield address


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def hit(server: ServerInThread, key: str, prompt: list[int], **others: object) -> int:
    """How many tokens of the prompt were cached."""
    return server.complete(prompt, key, max_tokens=2, **others)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong-key"}, {"Authorization": f"Basic {ANN}"}])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nothing"])
def test_without_a_key_nothing_is_answered(strict: ServerInThread, header: dict[str, str], path: str) -> None:
    answer = strict.get(path, headers=header)

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_the_client_raises_its_own_error_for_a_wrong_key(strict: ServerInThread) -> None:
    with pytest.raises(openai.AuthenticationError):
        strict.openai("sk-wrong").completions.create(model=MODEL, prompt="Hello")

    assert strict.openai(ANN).completions.create(model=MODEL, prompt="Hello").choices


def test_probes_need_no_key(strict: ServerInThread) -> None:
    assert [strict.get(path).status_code for path in ("/health", "/ready", "/version")] == [200, 200, 200]


def test_strictly_kept_apart_only_those_named_read_the_metrics(strict: ServerInThread, sharing: ServerInThread) -> None:
    def status(server: ServerInThread, key: str) -> int:
        return server.get("/metrics", headers={"Authorization": f"Bearer {key}"}).status_code

    assert [status(strict, key) for key in (ANN, BOB, OPS)] == [403, 403, 200]
    assert status(sharing, ANN) == 200


def test_strictly_kept_apart_a_tenant_finds_only_its_own(strict: ServerInThread) -> None:
    prompt = prompt_of(1, 100)

    hits = [hit(strict, key, prompt) for key in (ANN, ANN, ANN_TOO, BOB, BOB)]

    assert hits == [0, 99, 99, 0, 99]


def test_with_isolation_off_those_without_a_salt_share(sharing: ServerInThread) -> None:
    prompt = prompt_of(2, 100)

    hits = [hit(sharing, ANN, prompt), hit(sharing, BOB, prompt), hit(sharing, BOB, prompt, cache_salt="s")]

    assert hits == [0, 99, 0]


@pytest.mark.parametrize("isolation", ["strict", "sharing"])
def test_nobody_comes_to_anothers_blocks_by_a_salt(request: pytest.FixtureRequest, isolation: str) -> None:
    server: ServerInThread = request.getfixturevalue(isolation)
    prompt = prompt_of(3, 100)
    assert hit(server, ANN, prompt, cache_salt="secret") == 0
    assert hit(server, ANN, prompt, cache_salt="secret") == 99

    guesses = ["secret", "ann", "ann\0secret", "ann\0", "\0secret", "bob\0secret"]

    assert [hit(server, BOB, prompt, cache_salt=guess) for guess in guesses] == [0] * len(guesses)


@pytest.mark.long
def test_timing_tells_nothing_of_another_tenants_prompts(strict: ServerInThread, sharing: ServerInThread) -> None:
    """A probe takes the same time with and without another tenant's hit when isolation is strict, and else far less."""

    def ratio(server: ServerInThread) -> float:
        """Median time of probes with ann's prompt, divided by that of probes with prompts never asked."""
        asked, never_asked = [], []
        for seed in range(7):
            warm, cold = prompt_of(1000 + seed, 1200), prompt_of(2000 + seed, 1200)
            server.complete(warm, ANN, max_tokens=1)
            for prompt, times in ((warm, asked), (cold, never_asked)):  # in turns, so that other processes slow both
                times.append(server.complete(prompt, BOB, max_tokens=1)["kvtier"]["ttft_s"])
        return median(asked) / median(never_asked)

    assert ratio(sharing) < 0.5  # without isolation the leak can be seen
    assert 0.6 < ratio(strict) < 1 / 0.6


def test_a_tenants_quota_counts_all_its_salts(strict: ServerInThread) -> None:
    for seed in range(12):
        hit(strict, BOB, prompt_of(3000 + seed, 160), cache_salt=f"salt-{seed}")
        hit(strict, ANN, prompt_of(4000 + seed, 160))
    for seed in range(8):  # until those are at the eviction end, and copied down
        hit(strict, OPS, prompt_of(5000 + seed, 1000))

    come_true(lambda: strict.service.llm.statistics().cache.host_tenants.get(tenant_of("ann"), 0) > HOST_QUOTA)
    come_true(lambda: strict.ask(lambda core: not core.cache.num_in_flight))

    statistics = strict.service.llm.statistics()
    assert 0 < statistics.tenants["bob"][Tier.HOST] <= HOST_QUOTA
    assert statistics.cache.host_tenants[tenant_of("ann")] > HOST_QUOTA


def test_effective_salts_meet_only_where_they_should() -> None:
    asked = [(tenant, salt) for tenant in ("a", "b", "a\1") for salt in (None, "x", "b", "\0x")]

    strict = {effective_salt(tenant, salt, is_strict=True) for tenant, salt in asked}
    sharing = {effective_salt(tenant, salt, is_strict=False) for tenant, salt in asked}

    assert len(strict) == len(asked)
    assert len(sharing) == len(asked) - 2  # three without a salt
    assert effective_salt(None, "x", is_strict=False) == "x"
    assert tenant_of(effective_salt("a", "x", is_strict=True)) == tenant_of("a")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("keys.toml", '[keys]\n"sk-12345678" = "ann"\n'),
        ("keys.json", '{"keys": {"sk-12345678": "ann"}}'),
    ],
)
def test_keys_come_from_toml_or_json(tmp_path: Path, name: str, content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / name
    file.write_text(content)
    file.chmod(0o640)

    keys = ApiKeys.from_file(file)

    assert [keys.tenant_of(key) for key in ("sk-12345678", "sk-1234567", "")] == ["ann", None, None]
    assert "chmod 600" in caplog.text
    assert "sk-12345678" not in caplog.text + str(vars(keys))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[keys]\n",
        "keys = 3",
        '[keys]\n"sk-secret-1" = 3\n',
        '[keys]\n"short" = "ann"\n',
        '[keys]\n"sk-secret-1" = ""\n',
        '[keys]\n"sk-secret-1" = "ann\\u0000bob"\n',
        '[keys]\n"sha256:12" = "ann"\n',
        '"sk-secret-1" = "ann"\n',
        '[keys\n"sk-secret-1" = "ann"\n',
    ],
)
def test_a_file_that_is_wrong_is_an_error_in_one_line_that_does_not_tell_the_keys(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)

    with pytest.raises(ValueError, match=r"keys\.toml") as no:
        ApiKeys.from_file(file)

    assert "\n" not in str(no.value)
    assert "sk-secret-1" not in str(no.value)


def test_a_file_that_others_cannot_read_is_no_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys.toml"
    file.write_text('[keys]\n"sk-12345678" = "ann"\n')
    file.chmod(0o600)

    ApiKeys.from_file(file)

    assert not caplog.text
