"""The public classes in an interactive session: what they print, what help() shows, and which names they offer."""

import inspect
import io
import pydoc
import sys
from pathlib import Path

import pytest
from async_play import greedy, play, prompt_of
from small_models import build, byte_tokenizer, plain_greedy
from transformers import PreTrainedModel
from transformers.utils import logging

from kvtier import LLM, AsyncLLM, Completion, FinishReason
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason

CONFIG = {"device": {"capacity": "4MiB", "block_size": 16}, "host": {"capacity": "4MiB"}}


def public_names(of: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(of) if not name.startswith("_")}


def test_the_repr_of_an_llm_names_its_model_and_tiers(model: PreTrainedModel, tmp_path: Path) -> None:
    config = {**CONFIG, "disk": {"path": str(tmp_path), "capacity": "32MiB"}}

    with LLM(model, config, byte_tokenizer()) as llm:
        assert repr(llm) == f"<LLM LlamaForCausalLM: device=4.0 MiB, host=4.0 MiB, disk=32.0 MiB at {tmp_path}>"


def test_the_repr_of_a_completion_fits_on_a_line_and_says_where_the_prompt_came_from(model: PreTrainedModel) -> None:
    prompt = prompt_of(1, 40)

    with LLM(model, CONFIG, byte_tokenizer()) as llm:
        llm.generate([prompt], greedy(2))
        (done,) = llm.generate([prompt], greedy(2))

    assert repr(done).startswith(f"<Completion {done.text!r}: 2 tokens, finish_reason=length, ttft_s=")
    assert repr(done).endswith("; prompt: 39 device, 1 recomputed (1 last_block)>")
    assert str(done.tokens) == "39 device, 1 recomputed (1 last_block)"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (TokenBalance(), "0 recomputed"),
        (TokenBalance(device=2176, host=48), "2,176 device, 48 host"),
        (TokenBalance(disk=1, remote=2, recomputed=3), "1 disk, 2 remote, 3 recomputed"),
        (
            TokenBalance(recomputed=1014, reasons={Reason.NEVER_SEEN: 1000, Reason.COST: 14}),
            "1,014 recomputed (1,000 never_seen, 14 cost)",
        ),
    ],
)
def test_the_tokens_of_an_answer_print_words(tokens: TokenBalance, words: str) -> None:
    assert str(tokens) == words
    assert repr(tokens) == f"<TokenBalance {words}>"


def test_a_completion_without_tokens_has_a_repr() -> None:
    done = Completion("", [], FinishReason.ABORT, 0.25, TokenBalance())

    assert repr(done) == "<Completion '': 0 tokens, finish_reason=abort, ttft_s=0.250; prompt: 0 recomputed>"


@pytest.mark.parametrize("of", [LLM, AsyncLLM])
def test_the_signature_of_generate_can_be_read_in_help(of: type) -> None:
    signature = pydoc.plain(pydoc.render_doc(of.generate)).split("\n")[2]

    assert "numpy" not in signature
    assert "ExtraKeys(" not in signature
    assert len(signature) < 500


def test_an_async_llm_offers_what_callers_need_and_nothing_of_the_server() -> None:
    names = {"chat", "close", "default_sampling", "generate", "reset_prefix_cache", "start", "statistics"}

    assert public_names(AsyncLLM) == names
    assert "async for chunk in llm.generate" in inspect.getdoc(AsyncLLM)


def test_an_async_llm_streams_the_models_tokens_and_resets(model: PreTrainedModel) -> None:
    prompt = prompt_of(2, 40)
    expected = plain_greedy(model, prompt, 4)

    async def story() -> None:
        async with AsyncLLM(model, CONFIG, byte_tokenizer()) as llm:
            chunks = [chunk async for chunk in llm.generate(prompt, greedy(4))]

            assert [chunk.token_id for chunk in chunks] == expected
            assert repr(chunks[-1]).startswith(f"<StreamChunk {chunks[-1].text!r}: token {expected[-1]}, last: ")
            assert repr(llm) == "<AsyncLLM LlamaForCausalLM: device=4.0 MiB, host=4.0 MiB>"
            assert llm.default_sampling().max_tokens == 16
            assert await llm.reset_prefix_cache()
            (again, *_) = [chunk async for chunk in llm.generate(prompt, greedy(1))]
            assert again.tokens.recomputed == 40

    play(story())


@pytest.mark.parametrize(("is_terminal", "shows"), [(False, False), (True, True)])
def test_loading_shows_a_progress_bar_only_on_a_terminal(
    is_terminal: bool, shows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("llama").save_pretrained(tmp_path)
    shown = io.StringIO()
    shown.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    was_enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()  # a server in this process may have disabled the bars
    try:
        Checkpoint.of(tmp_path).model("auto")
    finally:
        if not was_enabled:
            logging.disable_progress_bar()

    assert ("Loading weights" in shown.getvalue()) is shows
