"""Speculative decoding below vLLM: what a drafter changes of the names of blocks, and of where a hit ends."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_connector_bed import FULL, HYBRID, ConnectorBed

from kvtier.connectors.vllm_connector.drafters import depends_on_next, drafter_facts
from kvtier.tiers.naming.groups import AttentionGroup


def engine(method: str = "eagle", **changes: Any) -> SimpleNamespace:
    """vLLM's configuration, with a drafter of its own or of other facts."""
    config = SimpleNamespace(to_json_string=lambda use_diff: changes.get("config", "{}"))
    facts = {"model": "draft", "dtype": "bfloat16", "quantization": None, "hf_config": config} | changes
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, draft_model_config=SimpleNamespace(**facts))
    )


def weights_of(config: Any) -> str:
    return f"weights of {config.model}"


def test_all_that_decides_a_drafters_bytes_is_told_apart() -> None:
    others = [
        engine(),
        engine("mtp"),
        engine(model="another"),
        engine(config='{"num_hidden_layers": 2}'),
        engine(dtype="float32"),
        engine(quantization="fp8"),
    ]

    told = [tuple(sorted(drafter_facts(each, weights_of).items())) for each in others]

    assert len(set(map(str, told))) == len(others)


@pytest.mark.parametrize("without", [SimpleNamespace(), SimpleNamespace(speculative_config=None), engine("ngram")])
def test_engines_whose_drafter_has_no_layers_share_blocks_with_those_without_one(without: SimpleNamespace) -> None:
    assert drafter_facts(without, weights_of) == {}


@pytest.mark.parametrize("depends", [True, False])
def test_a_drafter_depends_on_the_next_token_if_vllm_drops_its_last_block(depends: bool) -> None:
    speculative = SimpleNamespace(use_eagle_block_drop=lambda: depends)

    assert depends_on_next(SimpleNamespace(speculative_config=speculative)) is depends
    assert not depends_on_next(SimpleNamespace(speculative_config=None))


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("group_id", [0, -1])
def test_a_hit_ends_one_block_before_the_drafters_last_one(groups: tuple[AttentionGroup, ...], group_id: int) -> None:
    """The bytes at the end of a drafter's block depend on the next token, which the next block's name covers."""
    bed = ConnectorBed(groups, depend_on_next=[group_id % len(groups)])
    prompt = bed.prompt(42)

    assert bed.run(bed.request(prompt)) == 0
    assert bed.run(bed.request(prompt)) == 36
    assert bed.run(bed.request([*prompt[:6], *bed.prompt(10)])) == 0, "only one block is alike"
    bed.close()
