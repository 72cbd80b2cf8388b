"""Models that kvtier cannot serve are refused with a sentence that says what they need."""

import pytest
from tiny_families import tiny_model

from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.layers import observe_layers


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v4", "a cache of its own kind"),
        ("diffllama", "layer 0 attends more than once in a pass"),
        ("dory", "layer 0 attends more than once in a pass"),
        ("gemma4_unified_assistant", "does not run on token ids alone"),
        ("minimax", "a cache of its own kind"),
        ("xlstm", "a cache of its own kind"),
    ],
)
def test_a_model_is_refused_with_what_it_needs(family: str, reason: str) -> None:
    model = tiny_model(family)

    with pytest.raises(UnsupportedModel, match=reason) as refused:
        observe_layers(model, block_size=16)

    assert "\n" not in str(refused.value)
    assert model.config._attn_implementation == "eager"
