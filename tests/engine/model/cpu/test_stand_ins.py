"""StandIns: they compute while a pass runs, and no longer."""

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from small_models import build
from transformers import PreTrainedModel

from kvtier.engine.model.cpu.fused_norms import fused_norms
from kvtier.engine.model.cpu.fused_rotations import fused_rotations
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.packed_linears import packed_linears
from kvtier.engine.model.cpu.stand_ins import Place, StandIns
from kvtier.engine.model.digest import weights_digest

TOKENS = torch.arange(12)[None]
THREADS = KernelThreads(1)


def all_of(model: PreTrainedModel) -> StandIns:
    places: list[Place] = [*packed_linears(model, 1 << 40), *fused_norms(model, THREADS)]
    return StandIns([*places, *fused_rotations(model, THREADS)])


@torch.inference_mode()
def test_between_passes_the_model_is_as_it_was() -> None:
    model, rotation = build("llama"), llama.apply_rotary_pos_emb
    stand_ins = all_of(model)
    with stand_ins.on():
        assert llama.apply_rotary_pos_emb is not rotation
        model(TOKENS)

    model.lm_head.weight.zero_()

    assert not any("forward" in vars(layer) for layer in model.modules())
    assert not model(TOKENS).logits.any()
    assert llama.apply_rotary_pos_emb is rotation


def test_a_pass_that_fails_gives_the_model_back() -> None:
    model, rotation = build("llama"), llama.apply_rotary_pos_emb
    stand_ins = all_of(model)

    with pytest.raises(ZeroDivisionError), stand_ins.on():
        raise ZeroDivisionError

    assert not any("forward" in vars(layer) for layer in model.modules())
    assert llama.apply_rotary_pos_emb is rotation


def test_a_model_has_the_same_digest_while_another_engine_computes_with_it() -> None:
    model = build("llama")
    stand_ins, digest = all_of(model), weights_digest(model)

    with stand_ins.on():
        assert weights_digest(model) == digest


def test_passes_of_two_engines_that_overlap_leave_nothing_behind() -> None:
    rotation = llama.apply_rotary_pos_emb
    with all_of(build("llama")).on():
        late = all_of(build("llama"))  # made while the other's stand-ins are there
        under_way = late.on()
        under_way.__enter__()
    under_way.__exit__(None, None, None)

    assert llama.apply_rotary_pos_emb is rotation
