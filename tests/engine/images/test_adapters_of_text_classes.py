"""A LoRA trained on a model's class without an image encoder works on the class with the encoder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from lora_adapters import ATTENTION, plain_adapted, save_adapter
from peft.utils.save_and_load import load_peft_weights
from safetensors.torch import save_file
from test_image_answers import GREEDY, NUM_NEW, asked, llm_of
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from vision_models import VisionModel, build_vision, plain_answer

from kvtier.engine.model.adapter_folder import UnusableLora
from kvtier.engine.model.lora_adapter import load_adapter

TEXT_CLASSES = {  # the class that an adapter is trained on, and where the class with the encoder has its text layers
    "qwen3_5": ("Qwen3_5ForCausalLM", "model.language_model"),
    "qwen3_vl": ("Qwen3ForCausalLM", "model.language_model"),
    "qwen2_5_vl": ("Qwen2ForCausalLM", "model.language_model"),
    "smolvlm": ("LlamaForCausalLM", "model.text_model"),
}
LARGE = {"device": {"capacity": "8MiB", "block_size": 16}}


@pytest.fixture(
    params=[
        pytest.param(family, marks=[] if family == "qwen3_5" else [pytest.mark.slow], id=family)
        for family in TEXT_CLASSES
    ]
)
def seen(request: pytest.FixtureRequest) -> VisionModel:
    return build_vision(request.param)


def text_class_of(seen: VisionModel) -> PreTrainedModel:
    """A model of the class without an encoder, with the same weights as the text layers."""
    kind = getattr(transformers, TEXT_CLASSES[seen.family][0])
    values = seen.model.config.text_config.to_dict()
    values.pop("model_type")
    model: PreTrainedModel = kind(kind.config_class(**values))
    model.model.load_state_dict(seen.model.get_decoder().state_dict())
    model.lm_head.load_state_dict(seen.model.get_output_embeddings().state_dict())
    return model


def renamed(folder: Path, prefix: str) -> Path:
    """A copy of the adapter in *folder*, as if it had been trained on the class with the encoder."""
    copy = folder.with_name("renamed")
    copy.mkdir()
    config = (folder / "adapter_config.json").read_text()
    (copy / "adapter_config.json").write_text(config)
    weights = load_peft_weights(str(folder), device="cpu")
    before, after = "base_model.model.model.", f"base_model.model.{prefix}."
    named = {name.replace(before, after, 1): each.clone() for name, each in weights.items()}
    assert all(after in name or ".lm_head." in name for name in named)
    save_file(named, copy / "adapter_model.safetensors")
    return copy


def with_adapter(seen: VisionModel, folder: Path, layers: list[str]) -> VisionModel:
    """The model with peft's own layers, of which the encoder has none."""
    prefix = TEXT_CLASSES[seen.family][1]
    folder = renamed(folder, prefix)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["target_modules"] = rf"({prefix}.*\.({'|'.join(layers)})|lm_head)"
    file.write_text(json.dumps(config))
    return replace(seen, model=plain_adapted(build_vision(seen.family).model, folder))


def test_texts_and_images_get_the_tokens_of_the_model_with_pefts_layers(seen: VisionModel, tmp_path: Path) -> None:
    layers = [*ATTENTION, "up_proj"]
    targets = [*layers, "lm_head"]
    folder = save_adapter(text_class_of(seen), tmp_path / "trained", r=4, lora_alpha=8, target_modules=targets)
    adapted = with_adapter(seen, folder, layers)
    image, text = asked(seen, 1), "no image at all, only a text of some words"
    expected = [
        plain_answer(adapted, str(image.prompt), image.images, NUM_NEW),
        plain_answer(adapted, text, [], NUM_NEW),
    ]

    with llm_of(seen, LARGE | {"lora": {"own": {"path": str(folder)}}}) as llm:
        plain = llm.generate([image, text], GREEDY)
        done = llm.generate([image, text], GREEDY, lora="own")
        again = llm.generate([image, text], GREEDY, lora="own")

    assert [each.token_ids for each in done] == [each.token_ids for each in again] == expected
    assert all(mine.token_ids != base.token_ids for mine, base in zip(done, plain, strict=True))


@pytest.mark.parametrize("seen", ["smolvlm"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 2}, r"another base model \(the models differ in .*layers\.2"),
        ({"num_hidden_layers": 4}, r"another base model \(the models differ in .*layers\.[01]"),
        ({"intermediate_size": 96}, "size mismatch for model.layers.0"),
    ],
)
def test_an_adapter_of_another_text_class_is_refused(
    changes: dict[str, int], reason: str, seen: VisionModel, tmp_path: Path
) -> None:
    other = LlamaForCausalLM(LlamaConfig(**{**seen.model.config.text_config.to_dict(), **changes}))
    folder = save_adapter(other, tmp_path / "trained", r=4, target_modules=["q_proj", "up_proj"])

    with pytest.raises(UnusableLora, match=reason) as refused:
        load_adapter(seen.model, "own", folder)

    assert "\n" not in str(refused.value)
