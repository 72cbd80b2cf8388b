"""A model whose weights, parts or mode change while an engine has it: an error, and no block under the old name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import build, byte_tokenizer, plain_greedy
from transformers import PreTrainedModel

from kvtier.engine.llm import LLM
from kvtier.engine.model.errors import ChangedModel
from kvtier.engine.model.sampling import SamplingParams

NUM_NEW = 6
PROMPT = [(37 * i + 5) % 256 for i in range(300)]
OTHER = [(11 * i + 2) % 256 for i in range(200)]
GREEDY = SamplingParams(max_tokens=NUM_NEW)


def engine_of(model: PreTrainedModel, disk: Path) -> LLM:
    sizes = {"device": {"capacity": "1MiB"}, "host": {"capacity": "2MiB"}}
    return LLM(model, {**sizes, "disk": {"path": str(disk), "capacity": "32MiB"}}, byte_tokenizer())


def load_another_state(model: PreTrainedModel) -> None:
    model.load_state_dict({name: tensor * 1.01 for name, tensor in model.state_dict().items()})


def train_a_step(model: PreTrainedModel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode(False), torch.enable_grad():
        sum(weights.sum() for weights in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()


def add_to_data(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight.data += 0.01


def write_by_numpy(model: PreTrainedModel) -> None:
    model.lm_head.weight.detach().numpy()[:] += 0.01


def replace_a_parameter(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() + 0.01)


def cast(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)


def put_an_adapter_in(model: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), model)


def hook_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda layer, given, output: output)


def change_the_configuration(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 0.1


CHANGES = [
    load_another_state,
    train_a_step,
    add_to_data,
    write_by_numpy,
    replace_a_parameter,
    cast,
    put_an_adapter_in,
    hook_a_layer,
    change_the_configuration,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_computes_no_more_and_leaves_nothing_under_the_old_name(
    change: Callable[[PreTrainedModel], None], tmp_path: Path
) -> None:
    model = build("llama")
    llm = engine_of(model, tmp_path / "store")
    llm.generate(PROMPT, GREEDY)

    change(model)
    for prompt in (OTHER, PROMPT):
        with pytest.raises(ChangedModel, match="close the engine, and create a new one"):
            llm.generate(prompt, GREEDY)
    llm.check()
    llm.close()

    original = build("llama")
    with engine_of(original, tmp_path / "store") as later:
        done = later.generate([OTHER, PROMPT], GREEDY)
    assert done[0].tokens.disk == 0
    assert [list(it.token_ids) for it in done] == [plain_greedy(original, it, NUM_NEW) for it in (OTHER, PROMPT)]


def test_a_change_just_before_closing_writes_nothing_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    llm = engine_of(model, tmp_path / "store")
    llm.generate(PROMPT, GREEDY)

    add_to_data(model)
    llm.close()

    assert "the model was changed while the engine was open" in caplog.text


def test_in_training_mode_no_step_runs_and_after_eval_they_go_on(tmp_path: Path) -> None:
    model = build("llama")
    with engine_of(model, tmp_path / "store") as llm:
        model.train()
        with pytest.raises(ChangedModel, match="training mode; call its eval"):
            llm.generate(PROMPT, GREEDY)
        model.eval()

        assert list(llm.generate(PROMPT, GREEDY)[0].token_ids) == plain_greedy(build("llama"), PROMPT, NUM_NEW)
