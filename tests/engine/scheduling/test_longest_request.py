"""How long a request may be: as long as the engine takes it, and not one token longer."""

import pytest
from small_models import MODELS, build, byte_tokenizer

from kvtier import SamplingParams
from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS

BLOCK_BYTES = 16 * 1024  # of every small model, at 16 tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_slots", [7, 300])
def test_a_request_so_long_is_taken_and_none_longer(name: str, num_slots: int) -> None:
    device = {"capacity": num_slots * BLOCK_BYTES, "block_size": 16}
    scheduler = {"prefill_chunk": 32}
    config = as_config({"device": device, "host": {"capacity": 0}, "scheduler": scheduler})
    with build_core(build(name), byte_tokenizer(), config) as core:
        longest = core.longest_request

        core.add([1] * (longest - 1), SamplingParams(max_tokens=1), NO_EXTRA_KEYS, 0.0)

        with pytest.raises(ValueError, match="shorten"):
            core.add([1] * longest, SamplingParams(max_tokens=1), NO_EXTRA_KEYS, 0.0)
