"""KVTierCache and sparse attention: index keys are kept in the rows of the blocks whose keys they choose."""

from pathlib import Path

import pytest
import torch
from damaged_files import damage
from generated_prompts import NUM_TOKENS, opened, prompt_of
from small_models import COMMON
from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer

from kvtier import UnsupportedModel
from kvtier.connectors.transformers_cache.row_layout import KeysAndValues, LayerShape, RowLayout
from kvtier.engine.model.state_layers import StateLayers

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]

BLOCK_SIZE = 16
WHOLE = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
GREEDY = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
INDEX_DIM = 32


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model that reads 24 keys. Every second layer reads those that the layer before it chose: no index keys."""
    torch.manual_seed(7)
    config = GlmMoeDsaConfig(
        **{**COMMON, "num_key_value_heads": 4, "head_dim": 8, "initializer_range": 0.2},
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=24,
        index_topk=24,
        index_n_heads=32,
        index_head_dim=INDEX_DIM,
        index_topk_freq=2,
        index_skip_topk_offset=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
    )
    return GlmMoeDsaForCausalLM(config).eval()


def test_tokens_are_those_of_plain_transformers_also_after_a_restart_and_where_index_keys_were_damaged(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    """Only some layers have index keys. A damaged one is a shorter prefix, as other damaged bytes of a row are."""
    prompt = prompt_of(1)
    plain_cache = DynamicCache(config=model.config)
    expected = model.generate(prompt, past_key_values=plain_cache, **GREEDY)
    next_turn = torch.cat([expected.sequences, prompt_of(2, 20)], dim=1)
    expected_next = model.generate(next_turn, **GREEDY)
    damaged = plain_cache.layers[0].indexer_keys[0, 5 * BLOCK_SIZE : 6 * BLOCK_SIZE]

    answers = []
    with opened(tmp_path, model) as cache, cache.prompt(prompt) as past:
        answers.append((model.generate(prompt, past_key_values=past, **GREEDY), 0, past))
    damage(tmp_path / "store", damaged.numpy().tobytes())
    with opened(tmp_path, model) as cache:
        for token_ids, num_expected in ((prompt, 5 * BLOCK_SIZE), (prompt, WHOLE), (next_turn, 320)):
            with cache.prompt(token_ids) as past:
                answers.append((model.generate(token_ids, past_key_values=past, **GREEDY), num_expected, past))
        assert cache.statistics().corrupt_blocks == 1

    for (answer, num_expected, past), wanted in zip(
        answers, [expected, expected, expected, expected_next], strict=True
    ):
        assert answer.sequences.tolist() == wanted.sequences.tolist()
        assert past.num_loaded_tokens == num_expected
        logits, wanted_logits = torch.cat(answer.logits), torch.cat(wanted.logits)
        assert (logits - wanted_logits).abs().max() <= 1e-4 * wanted_logits.abs().max()


def test_a_row_gives_back_the_index_keys_of_each_block_in_the_layers_that_have_them() -> None:
    shapes = [LayerShape(1, 24, 8, torch.float32, 0, INDEX_DIM), LayerShape(1, 24, 8, torch.float32, 0)]
    layout = RowLayout(shapes, BLOCK_SIZE, StateLayers(()))
    written, found = (
        layout.empty(3 * BLOCK_SIZE, torch.device("cpu")),
        layout.empty(3 * BLOCK_SIZE, torch.device("cpu")),
    )
    for number, part in enumerate(part for layer in written for part in layer.parts):
        part.copy_(torch.arange(part.numel()).view(part.shape) + 1000 * number)
    rows = torch.zeros(3, layout.row_bytes, dtype=torch.uint8)

    layout.write(rows, written)
    layout.read(rows.flip(0), found)

    assert [len(layer.parts) for layer in found] == [3, 2]
    for mine, other in zip(written, found, strict=True):
        for part, part_found in zip(mine.parts, other.parts, strict=True):
            blocks = part_found.split(BLOCK_SIZE, dim=1)
            assert torch.equal(torch.cat(blocks[::-1], dim=1), part)


def test_a_layer_that_keeps_index_keys_of_another_dtype_is_refused() -> None:
    kept = KeysAndValues(
        torch.zeros(1, 1, 24), torch.zeros(1, 1, 8), torch.zeros(1, 1, INDEX_DIM, dtype=torch.bfloat16)
    )

    with pytest.raises(UnsupportedModel, match=r"several dtypes \(torch.bfloat16, torch.float32\)"):
        LayerShape.of(DynamicIndexedLayer(), kept)
