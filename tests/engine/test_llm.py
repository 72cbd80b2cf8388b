"""LLM: what callers give and get, and what a second process finds on disk."""

import json
import os
import pty
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import small_models
import torch
from small_models import VOCAB, build, byte_tokenizer, plain_greedy
from transformers import PreTrainedModel

from kvtier import LLM, Completion, FinishReason, SamplingParams
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.tiers.naming.tier import Reason, Tier

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails
PROCESS_TIMEOUT_S = 300.0  # for what takes seconds
TEXT = "The harbour master wrote down every ship. "


@pytest.fixture
def llm(model: PreTrainedModel) -> Iterator[LLM]:
    with LLM(model, configuration(), byte_tokenizer()) as opened:
        yield opened
        opened.check()


def configuration(folder: Path | None = None, device_slots: int = 200, host_slots: int = 200) -> dict[str, object]:
    tables: dict[str, object] = {
        "device": {"capacity": device_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": host_slots * BLOCK_BYTES},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
    }
    return tables if folder is None else {**tables, "disk": {"path": str(folder / "store"), "capacity": "64MiB"}}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def greedy(max_tokens: int = 8, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def assert_balanced(done: Completion, num_tokens: int) -> None:
    tokens = done.tokens
    assert tokens.device + tokens.host + tokens.disk + tokens.recomputed == num_tokens
    assert sum(tokens.reasons.values()) == tokens.recomputed


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own that can import the small models."""
    paths = [str(Path(small_models.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False
    )


# What goes in, what comes out


def test_text_token_ids_and_lists_of_both_give_the_same_completions(llm: LLM, model: PreTrainedModel) -> None:
    token_ids = byte_tokenizer()(TEXT)["input_ids"]
    expected = plain_greedy(model, token_ids, 8)

    for prompts in (TEXT, token_ids, [TEXT], [token_ids], tuple(token_ids)):
        completions = llm.generate(prompts, greedy())

        assert [done.token_ids for done in completions] == [expected]
        assert_balanced(completions[0], len(token_ids))


def test_completions_come_in_the_order_of_the_prompts_whichever_finishes_first(
    llm: LLM, model: PreTrainedModel
) -> None:
    prompts: list[str | Sequence[int]] = [prompt_of(1, 300), TEXT, prompt_of(2, 3), prompt_of(3, 130)]
    token_ids = [byte_tokenizer()(TEXT)["input_ids"] if isinstance(prompt, str) else prompt for prompt in prompts]

    completions = llm.generate(prompts, greedy())

    assert [done.token_ids for done in completions] == [plain_greedy(model, prompt, 8) for prompt in token_ids]
    for done, prompt in zip(completions, token_ids, strict=True):
        assert_balanced(done, len(prompt))


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize("prompts", ["", [[]], ["fine", ""]])
def test_an_empty_prompt_is_refused_in_one_line_and_nothing_stays_queued(llm: LLM, prompts: object) -> None:
    with pytest.raises(ValueError, match="is empty") as no:
        llm.generate(prompts)

    assert "\n" not in str(no.value)
    assert not llm.core.has_work
    assert llm.generate("fine", greedy())[0].finish_reason is FinishReason.LENGTH


def test_the_text_is_the_decoding_of_the_tokens(llm: LLM) -> None:
    done = llm.generate(TEXT, greedy(30))[0]

    assert done.text == byte_tokenizer().decode(done.token_ids)


# Where it ends


def test_max_tokens_ends_with_reason_length(llm: LLM) -> None:
    done = llm.generate(TEXT, greedy(5))[0]

    assert (len(done.token_ids), done.finish_reason) == (5, FinishReason.LENGTH)


def test_a_stop_string_ends_before_itself(llm: LLM) -> None:
    text = llm.generate(TEXT, greedy(40))[0].text
    stop = text[12:15]

    done = llm.generate(TEXT, greedy(40, stop=["never said, surely", stop]))[0]

    assert (done.text, done.finish_reason) == (text[: text.index(stop)], FinishReason.STOP)


def test_a_stop_token_ends_and_is_the_last_token(llm: LLM) -> None:
    token_ids = llm.generate(TEXT, greedy(40))[0].token_ids
    stop = token_ids[9]

    done = llm.generate(TEXT, greedy(40, stop_token_ids=[stop]))[0]

    assert (done.token_ids, done.finish_reason) == (token_ids[: token_ids.index(stop) + 1], FinishReason.STOP)


@pytest.mark.parametrize("as_list", [False, True])
def test_the_end_token_of_the_generation_settings_ends_unless_it_is_ignored(as_list: bool) -> None:
    model = build("llama")
    token_ids = plain_greedy(model, byte_tokenizer()(TEXT)["input_ids"], 20)
    end = token_ids[6]
    model.generation_config.eos_token_id = [end, VOCAB - 1] if as_list else end

    with LLM(model, configuration(), byte_tokenizer()) as llm:
        ended = llm.generate(TEXT, SamplingParams(max_tokens=20))[0]
        ignored = llm.generate(TEXT, greedy(20))[0]

    assert (ended.token_ids[-1], ended.finish_reason) == (end, FinishReason.STOP)
    assert ended.token_ids == token_ids[: token_ids.index(end) + 1]
    assert (ignored.token_ids, ignored.finish_reason) == (token_ids, FinishReason.LENGTH)


# How it is drawn


def test_a_seed_draws_the_same_tokens_alone_again_and_in_a_batch(llm: LLM) -> None:
    prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in enumerate((60, 7, 130))]
    seeded = greedy(20, temperature=1.0, top_p=0.95, seed=5)

    alone = [llm.generate(prompt, seeded)[0].token_ids for prompt in prompts]
    again = [llm.generate(prompt, seeded)[0].token_ids for prompt in prompts]
    batch = [done.token_ids for done in llm.generate(prompts, seeded)]
    other = [llm.generate(prompt, greedy(20, temperature=1.0, seed=6))[0].token_ids for prompt in prompts]

    assert alone == again == batch
    assert all(one != another for one, another in zip(alone, other, strict=True))


def test_top_k_1_is_greedy(llm: LLM) -> None:
    drawn = llm.generate(TEXT, greedy(20, temperature=1.0, top_k=1))[0]

    assert drawn.token_ids == llm.generate(TEXT, greedy(20))[0].token_ids


# What is cached, and for which requests


def test_the_first_reading_is_never_seen_and_the_second_comes_from_the_device(llm: LLM) -> None:
    prompt = prompt_of(1, 100)

    cold, warm = (llm.generate(prompt, greedy())[0] for _ in range(2))

    assert cold.tokens.reasons == {Reason.NEVER_SEEN: 96, Reason.LAST_BLOCK: 4}
    assert (warm.tokens.device, warm.tokens.reasons) == (99, {Reason.LAST_BLOCK: 1})
    assert cold.token_ids == warm.token_ids


def test_the_last_token_is_computed_even_if_every_block_is_cached(llm: LLM) -> None:
    prompt = prompt_of(1, 96)

    cold, warm = (llm.generate(prompt, greedy())[0] for _ in range(2))

    assert (warm.tokens.device, warm.tokens.copied, warm.tokens.reasons) == (95, 15, {Reason.LAST_BLOCK: 1})
    assert warm.token_ids == cold.token_ids
    assert cold.token_ids == warm.token_ids


def test_only_prompts_of_the_same_salt_share_blocks(llm: LLM) -> None:
    prompt = prompt_of(1, 100)
    first = llm.generate(prompt, greedy(), cache_salt="ann")[0]

    hits = {salt: llm.generate(prompt, greedy(), cache_salt=salt)[0] for salt in (None, "bob", "ann")}

    assert {salt: done.tokens.device for salt, done in hits.items()} == {None: 0, "bob": 0, "ann": 99}
    assert all(done.token_ids == first.token_ids for done in hits.values())
    assert llm.where(prompt, cache_salt="ann")["device"] == 96
    assert llm.where(prompt, cache_salt="cid")["device"] == 0


def test_a_request_may_skip_the_cache_and_gets_the_same_tokens(llm: LLM) -> None:
    prompt = prompt_of(1, 100)
    cold = llm.generate(prompt, greedy())[0]

    skipped = llm.generate(prompt, greedy(), skip_reading_prefix_cache=True)[0]

    assert skipped.tokens.reasons == {Reason.SKIPPED: 96, Reason.LAST_BLOCK: 4}
    assert skipped.token_ids == cold.token_ids
    assert llm.generate(prompt, greedy())[0].tokens.device == 99


def test_the_next_turn_hits_every_full_block_of_prompt_and_answer(llm: LLM, model: PreTrainedModel) -> None:
    prompt = prompt_of(1, 90)
    answer = llm.generate(prompt, greedy(60))[0].token_ids
    turn = [*prompt, *answer, *prompt_of(2, 30)]

    done = llm.generate(turn, greedy())[0]

    assert done.tokens.device == 90 + 60 - 1  # the last answered token was never fed to the model
    assert done.token_ids == plain_greedy(model, turn, 8)
    assert_balanced(done, 180)


def test_tokens_balance_from_every_tier(model: PreTrainedModel, tmp_path: Path) -> None:
    rng = random.Random(3)
    stems = [prompt_of(stem, 150) for stem in range(4)]
    with LLM(model, configuration(tmp_path, device_slots=24, host_slots=24), byte_tokenizer()) as llm:
        total = llm.statistics().tokens
        for seed in range(25):
            prompt = [*rng.choice(stems)[: rng.randrange(30, 150)], *prompt_of(seed, rng.randrange(20))]

            done = llm.generate(prompt, greedy())[0]

            assert_balanced(done, len(prompt))
            total = total.plus(done.tokens)
        assert llm.statistics().tokens == total
        llm.check()

    assert min(total.device, total.host, total.disk) > 0


def test_a_prompt_that_diverges_inside_a_block_computes_from_there_and_answers_the_same(model: PreTrainedModel) -> None:
    shared, first, second = prompt_of(1, 100), prompt_of(2, 40), prompt_of(3, 40)
    with LLM(model, configuration(), byte_tokenizer()) as llm:
        llm.generate([*shared, *first], greedy())
        second_tokens = llm.generate([*shared, *second], greedy())[0]
        llm.check()

    assert second_tokens.tokens.device == 100 + (first[0] == second[0])
    assert second_tokens.token_ids == plain_greedy(model, [*shared, *second], 8)


def test_without_partial_blocks_only_whole_ones_are_reused(model: PreTrainedModel) -> None:
    settings = configuration()
    settings["device"] |= {"partial_blocks": False}
    with LLM(model, settings, byte_tokenizer()) as llm:
        llm.generate(prompt_of(1, 96), greedy())
        again = llm.generate(prompt_of(1, 96), greedy())[0]

    assert (again.tokens.device, again.tokens.copied) == (80, 0)


def test_the_next_turn_of_a_chat_computes_only_what_is_new(model: PreTrainedModel) -> None:
    question = prompt_of(1, 60)
    with LLM(model, configuration(), byte_tokenizer()) as llm:
        answer = llm.generate(question, greedy(40))[0].token_ids
        turn = llm.generate([*question, *answer, *prompt_of(2, 9)], greedy())[0]

    assert turn.tokens.device == 60 + 40 - 1  # the last answered token was never fed to the model
    assert turn.tokens.recomputed == 1 + 9


def test_a_chat_of_many_turns_leaves_one_unfinished_block_behind(model: PreTrainedModel) -> None:
    tokens = prompt_of(1, 20)
    with LLM(model, configuration(), byte_tokenizer()) as llm:
        for _ in range(8):
            tokens += llm.generate(tokens, greedy(5))[0].token_ids
        num_blocks = llm.statistics().cache.tiers[Tier.DEVICE].num_blocks

    assert num_blocks <= len(tokens) // BLOCK_SIZE + 1


def test_a_reset_forgets_everything_everywhere(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = prompt_of(1, 100)
    with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
        llm.generate(prompt, greedy())
        llm.generate(prompt, greedy())
        assert llm.statistics().prefix.recent_hit_ratio > 0.4

        assert llm.reset_prefix_cache()

        assert llm.where(prompt)["nowhere"] == 100
        assert llm.statistics().prefix.recent_hit_ratio == 0
        llm.check()


def test_where_counts_every_token_of_a_prompt_once(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = prompt_of(1, 100)
    with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
        before = llm.where(prompt)
        llm.generate(prompt, greedy())
        after = llm.where(prompt)
        half_known = llm.where([*prompt[:50], *prompt_of(2, 50)])
    with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
        restarted = llm.where(prompt)
        assert llm.where(TEXT)["nowhere"] == len(TEXT)

    assert before == {"device": 0, "host": 0, "disk": 0, "remote": 0, "nowhere": 100}
    assert after == {"device": 96, "host": 0, "disk": 0, "remote": 0, "nowhere": 4}
    assert half_known == {"device": 48, "host": 0, "disk": 0, "remote": 0, "nowhere": 52}
    assert restarted == {"device": 0, "host": 0, "disk": 96, "remote": 0, "nowhere": 4}


def test_statistics_are_values_that_do_not_change_later(llm: LLM) -> None:
    llm.generate(prompt_of(1, 100), greedy())
    before = llm.statistics()
    kept = (before.tokens.num_tokens, before.cache.tiers[Tier.DEVICE].num_blocks)

    llm.generate(prompt_of(2, 100), greedy())

    assert kept == (100, 7) == (before.tokens.num_tokens, before.cache.tiers[Tier.DEVICE].num_blocks)
    after = llm.statistics()
    assert (after.tokens.num_tokens, after.cache.tiers[Tier.DEVICE].num_blocks) == (200, 14)
    assert (after.num_waiting, after.num_promoting, after.num_running) == (0, 0, 0)


# From one process to the next


def test_closing_twice_does_nothing_more(model: PreTrainedModel, tmp_path: Path) -> None:
    llm = LLM(model, configuration(tmp_path), byte_tokenizer())
    llm.generate(TEXT)

    llm.close()
    llm.close()


def test_closing_reports_what_is_left_to_write(model: PreTrainedModel, tmp_path: Path) -> None:
    left: list[int] = []
    llm = LLM(model, configuration(tmp_path), byte_tokenizer())
    llm.generate(prompt_of(1, 320), greedy())

    llm.close(left.append)

    assert left[0] > 0
    assert left == sorted(left, reverse=True)


@pytest.mark.long
def test_a_process_that_just_ends_has_written_its_cache_to_disk(model: PreTrainedModel, tmp_path: Path) -> None:
    script = """
import json, sys
from small_models import build, byte_tokenizer
from kvtier import LLM, SamplingParams

llm = LLM(build("llama"), json.loads(sys.argv[1]), byte_tokenizer())
llm.generate(json.loads(sys.argv[2]), SamplingParams(max_tokens=8, ignore_eos=True))
"""
    prompt, config = prompt_of(1, 100), configuration(tmp_path)

    ended = run_python(script, json.dumps(config), json.dumps(prompt))
    with LLM(model, config, byte_tokenizer()) as llm:
        done = llm.generate(prompt, greedy())[0]

    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert (done.tokens.disk, done.token_ids) == (96, plain_greedy(model, prompt, 8))


def test_a_store_that_another_process_has_open_is_left_alone_and_its_pid_said_in_one_line(
    model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = """
import pathlib, sys
from kvtier.store.lmdb.lmdb_store import LmdbStore

with LmdbStore(pathlib.Path(sys.argv[1]), 64 << 20):
    print("open", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
            assert llm.generate(TEXT)
            (said,) = caplog.messages
        other.stdin.close()
        other.wait(PROCESS_TIMEOUT_S)

    assert f"is open in process {other.pid};" in said
    assert "\n" not in said
    with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
        assert llm.generate(TEXT)


def test_an_llm_that_could_not_start_leaves_the_store_to_the_next(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host"):
        LLM(model, {**configuration(tmp_path), "host": {"capacity": 100}}, byte_tokenizer())

    with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
        assert llm.generate(TEXT)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"device": {"gpu_memory_utilization": 0.5}},
            "gpu_memory_utilization 0.5: there is no GPU; set device.capacity instead",
        ),
        ({"device": {"capacity": 1}}, "device capacity: 1 bytes hold 0 blocks"),
        (
            {"device": {"capacity": "900000TB"}},
            "device capacity: .* bytes cannot be allocated on cpu; lower device.capacity",
        ),
        (
            {"host": {"capacity": "900000TB"}},
            r"host\.capacity .* TiB: is more than the memory of this machine, .*; give a smaller size",
        ),
    ],
)
def test_a_capacity_that_cannot_be_had_is_one_line_that_says_which(
    model: PreTrainedModel, tables: dict, message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=message) as caught:
        LLM(model, {**configuration(), **tables}, byte_tokenizer())

    assert "\n" not in str(caught.value)


def test_an_llm_interrupted_at_the_end_of_its_start_leaves_the_store_to_the_next(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtier.engine.build_core.Scheduler", interrupt)
    with pytest.raises(KeyboardInterrupt):
        LLM(model, configuration(tmp_path), byte_tokenizer())

    assert_can_be_opened(tmp_path / "store")


@pytest.mark.parametrize("part", ["flush", "close"])
def test_an_llm_that_fails_while_closing_leaves_the_store_to_the_next(
    model: PreTrainedModel, tmp_path: Path, part: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("of the tiers")

    llm = LLM(model, configuration(tmp_path), byte_tokenizer())
    close = llm.core.cache.close
    setattr(llm.core.cache.drain if part == "flush" else llm.core.cache, part, fail)

    with pytest.raises(AssertionError, match="of the tiers"):
        llm.close()

    assert_can_be_opened(tmp_path / "store")
    close()


def assert_can_be_opened(folder: Path) -> None:
    """Assert that no remains of an engine lock the store."""
    LmdbStore(folder, 64 << 20).close()


def test_another_model_finds_nothing_in_the_same_store(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = prompt_of(1, 100)
    with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
        llm.generate(prompt, greedy())
    other = build("llama")
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(std=0.2)

    with LLM(other, configuration(tmp_path), byte_tokenizer()) as llm:
        foreign = llm.generate(prompt, greedy())[0]
    with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
        own = llm.generate(prompt, greedy())[0]

    assert foreign.tokens.reasons == {Reason.NEVER_SEEN: 96, Reason.LAST_BLOCK: 4}
    assert foreign.token_ids == plain_greedy(other, prompt, 8)
    assert own.tokens.disk == 96


def test_another_seed_of_names_finds_nothing_in_the_same_store(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = prompt_of(1, 100)
    with LLM(model, configuration(tmp_path), byte_tokenizer()) as llm:
        llm.generate(prompt, greedy())

    with LLM(model, {**configuration(tmp_path), "names": {"seed": "another"}}, byte_tokenizer()) as llm:
        done = llm.generate(prompt, greedy())[0]

    assert done.tokens.recomputed == 100


def test_a_loaded_model_without_a_tokenizer_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="pass tokenizer="):
        LLM(model, configuration())


# What the terminal shows


class Terminal:
    """A terminal to write to, and all that was written to it."""

    def __init__(self) -> None:
        self._main_end, writing_end = pty.openpty()
        self.output = os.fdopen(writing_end, "w")
        self._shown: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def shown(self) -> str:
        """Close the terminal; all that was written to it."""
        self.output.close()
        self._reader.join(DEADLINE_S)
        os.close(self._main_end)
        return b"".join(self._shown).decode()

    def _read(self) -> None:
        try:
            while data := os.read(self._main_end, 4096):
                self._shown.append(data)
        except OSError:  # how Linux says that the writing end is closed
            return


def test_the_progress_bar_goes_to_stderr_and_nothing_to_stdout(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.output)
        llm.generate([prompt_of(seed, 50) for seed in range(3)], greedy(), progress=True)

    shown = terminal.shown()

    assert "prompts" in shown
    assert "3/3" in shown
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_nothing_is_printed(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([prompt_of(seed, 50) for seed in range(6)], greedy())

    assert capfd.readouterr() == ("", "")
