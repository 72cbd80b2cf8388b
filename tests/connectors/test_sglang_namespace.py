"""SGLang's pages: every option of its server has a verdict, and all that decides bytes is in the namespace.

The parts that ask the real SGLang run in its environment: `make test-engines`.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.sglang_storage import identity
from kvtier.connectors.sglang_storage.identity import folder_of, names_of, namespace_of, pool_facts, weights_of
from kvtier.connectors.sglang_storage.known_sglang import UnsupportedEngine
from kvtier.connectors.sglang_storage.options import JUDGED
from kvtier.connectors.sglang_storage.page_runs import StorageThreads
from kvtier.connectors.sglang_storage.server_facts import option_reader, server_facts, weights_version

HARMLESS = [option for options in JUDGED.harmless.values() for option in options]
RANKS = ("tp", "pp", "attn_cp")
HAS_SGLANG = "sglang" in sys.modules or importlib.util.find_spec("sglang") is not None
needs_sglang = pytest.mark.skipif(not HAS_SGLANG, reason="there is no sglang here: make .venv/sglang/installed")


class MHATokenToKVPoolHost:
    """A host pool as SGLang's."""


class AnotherPoolHost(MHATokenToKVPoolHost):
    """One of another class."""


class MambaPoolHost(MHATokenToKVPoolHost):
    """A host pool of states as SGLang's."""


CONFIG: dict[str, object] = {
    **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank", "dcp_rank"), 0),
    **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size", "dcp_size"), 4),
    "is_mla_model": False,
    "model_name": "/models/Qwen3-8B",
    "tp_lcm_size": None,
    "should_split_heads": False,
}
POOL: dict[str, object] = {
    "layout": "page_first",
    "storage_format_tag": "bf16",
    "dtype": "torch.bfloat16",
    "page_size": 64,
    "layer_num": 36,
    "start_layer": 0,
    "end_layer": 36,
    "head_num": 8,
    "head_dim": 128,
    "v_head_dim": 128,
    "kv_cache_dim": 576,
}


STATES: dict[str, object] = {
    "layout": "page_first",
    "dtype": "torch.bfloat16",
    "page_size": 1,
    "num_mamba_layers": 36,
    "temporal_dtype": "torch.float32",
    "temporal_state_shape": (32, 128, 128),
    "conv_dtype": "torch.bfloat16",
    "conv_state_shapes": [(8192, 3)],
}


def states_of(**changes: object) -> object:
    made = MambaPoolHost()
    vars(made).update(STATES | changes)
    return made


def pool_of(kind: type = MHATokenToKVPoolHost, **changes: object) -> object:
    made = kind()
    vars(made).update(POOL | changes)
    return made


def namespace(
    options: dict[str, Any] | None = None,
    config: dict[str, object] | None = None,
    pool: object | None = None,
    weights: str = "sha256 of the files",
    runs: tuple[int, ...] = (1024,),
    is_in_place: bool = True,
    others: dict[str, object] | None = None,
) -> bytes:
    server = server_facts((options or {}).get)
    told = SimpleNamespace(**(CONFIG | (config or {})))
    pools = {"kv": pool or pool_of(), **(others or {})}
    facts = {name: pool_facts(each, runs) for name, each in pools.items()}
    return namespace_of(told, facts, weights, is_in_place, server)


# What decides bytes, once more: an option that is taken out of the table has to be taken out here, too.
DECIDES = """
    load_format model_loader_extra_config custom_weight_loader startup_weight_load_mode
    remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
    checkpoint_engine_wait_weights_before_ready modelexpress_config decrypted_config_file revision trust_remote_code
    model_impl model_config_parser json_model_override_args is_embedding dtype quantization kv_cache_dtype
    prefill_kv_cache_dequant_dtype modelopt_quant modelopt_checkpoint_restore_path quantize_and_serve
    rl_quant_profile rl_on_policy_target enable_tf32_matmul page_size c128_page_size enable_page_major_kv_layout
    enable_unified_memory enable_dsa_cache_layer_split enable_kv_cache_sharding enable_cp_decode_attn_tp
    enable_prefill_cp cp_strategy attn_dp_size enable_dp_attention attention_backend prefill_attention_backend
    decode_attention_backend dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
    dsa_triton_union dsv4_prefill_backend dsv4_attn_backend enable_deepseek_v4_fp4_indexer qsa_indexer_dtype
    enable_hisparse hisparse_config enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
    fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend moe_runner_backend moe_a2a_backend
    flashinfer_a2a_dispatch_type deepep_mode deepep_v2_mode deepep_dispatcher_output_dtype fuseep_mode
    enable_quant_communications flashinfer_mxfp4_moe_precision enable_w4a4_mxfp4_megamoe
    disable_flashinfer_cutlass_moe_fp4_allgather enable_megamoe_for_layernorm_sp kt_weight_path kt_method
    kt_num_gpu_experts kt_max_deferred_experts_per_token enable_nvidia_megakernel enable_amd_monokernel
    linear_attn_backend linear_attn_prefill_backend linear_attn_decode_backend mamba_ssm_dtype
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds enable_int8_mamba_checkpoint
    enable_linear_replayssm linear_replayssm_cache_len dllm_algorithm dllm_algorithm_config mm_process_config
    image_processor_backend disable_fast_image_processor enable_precise_embedding_interpolation
    trust_mm_content_hashes lora_target_modules experts_shared_outer_loras lora_strict_loading ple_offload_backend
    forward_hooks device boundary_reduction
"""


def test_the_options_that_decide_bytes_are_these() -> None:
    assert list(JUDGED.decides) == DECIDES.split()


@pytest.mark.parametrize("option", JUDGED.decides)
def test_an_option_that_decides_bytes_is_in_the_namespace(option: str) -> None:
    assert namespace({option: "another"}) != namespace()


@pytest.mark.parametrize("option", HARMLESS)
def test_an_option_that_decides_no_byte_is_not_in_the_namespace(option: str) -> None:
    assert namespace({option: "another"}) == namespace()


@pytest.mark.parametrize("name", CONFIG)
def test_what_sglang_tells_of_a_rank_is_in_the_namespace(name: str) -> None:
    assert namespace(config={name: "another"}) != namespace()


@pytest.mark.parametrize("name", POOL)
def test_what_a_pool_says_of_itself_is_in_the_namespace(name: str) -> None:
    assert namespace(pool=pool_of(**{name: "another"})) != namespace()


@pytest.mark.parametrize("name", STATES)
def test_what_a_pool_of_states_says_of_itself_is_in_the_namespace(name: str) -> None:
    assert namespace(others={"mamba": states_of(**{name: "another"})}) != namespace(others={"mamba": states_of()})


def test_the_set_of_pools_is_in_the_namespace() -> None:
    pools = [{}, {"mamba": states_of()}, {"swa": pool_of()}, {"indexer": pool_of()}]
    pools.append({"mamba": states_of(), "swa": pool_of()})

    assert len({namespace(others=each) for each in pools}) == len(pools)


def test_what_stands_beside_config_and_pool_is_in_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {namespace()}
    seen.add(namespace(pool=pool_of(AnotherPoolHost)))
    seen.add(namespace(weights="revision 2"))
    seen.add(namespace(runs=(512, 512)))
    seen.add(namespace(is_in_place=False))
    monkeypatch.setattr("kvtier.connectors.sglang_storage.identity.version", lambda package: "0.6")
    seen.add(namespace())
    monkeypatch.setattr(identity, "SCHEME", identity.SCHEME + 1)
    seen.add(namespace())

    assert len(seen) == 7


def scales(folder: Path, content: str) -> dict[str, str]:
    (folder / "scales.json").write_text(content)
    return {"quantization_param_path": str(folder / "scales.json")}


def test_scales_of_an_fp8_cache_count_by_their_content(tmp_path: Path) -> None:
    first, second = (namespace(scales(tmp_path, content)) for content in ("1.0", "2.0"))
    (tmp_path / "moved").mkdir()

    assert len({first, second, namespace()}) == 3
    assert namespace(scales(tmp_path / "moved", "2.0")) == second
    with pytest.raises(UnsupportedEngine, match=r"quantization_param_path: .*none.json cannot be read"):
        namespace({"quantization_param_path": str(tmp_path / "none.json")})


def adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize(
    "said",
    [
        lambda path: [f"legal={path}"],
        lambda path: [{"lora_name": "legal", "lora_path": str(path), "pinned": True}],
        lambda path: [SimpleNamespace(lora_name="legal", lora_path=str(path), lora_id="9f2c")],
        lambda path: {"legal": str(path)},
        lambda path: {"legal": SimpleNamespace(lora_name="legal", lora_path=str(path))},
    ],
    ids=["text", "table", "record", "dict", "dict of records"],
)
def test_an_adapter_that_is_replaced_in_its_folder_is_another_namespace(
    tmp_path: Path, said: Callable[[Path], object]
) -> None:
    first = namespace({"lora_paths": said(adapter(tmp_path / "a", b"one"))})
    second = namespace({"lora_paths": said(adapter(tmp_path / "a", b"two"))})
    moved = namespace({"lora_paths": said(adapter(tmp_path / "b", b"two"))})

    assert len({first, second, namespace()}) == 3
    assert moved == second


def test_adapters_are_known_by_their_names_too(tmp_path: Path) -> None:
    path = str(adapter(tmp_path / "a", b"one"))
    said = [
        [f"legal={path}"],
        [f"medical={path}"],
        [path],
        [{"lora_name": "fiscal", "lora_path": path}],
        [f"legal={path}", f"medical={path}"],
    ]

    assert len({namespace(), *(namespace({"lora_paths": each}) for each in said)}) == 6


def test_a_draft_model_beside_the_model_counts_by_its_content(tmp_path: Path) -> None:
    """SGLang may put the keys and values of its layers into the model's own pages."""
    model, draft = adapter(tmp_path / "model", b"model"), adapter(tmp_path / "draft", b"one")
    options = {"model_path": str(model), "speculative_draft_model_path": str(draft)}
    first = namespace(options)
    adapter(draft, b"two")

    assert len({first, namespace(options), namespace()}) == 3
    assert namespace({**options, "speculative_draft_model_path": str(model)}) == namespace(), "the model's own layers"
    with pytest.raises(UnsupportedEngine, match=r"speculative_draft_model_path: .*none cannot be read"):
        namespace({**options, "speculative_draft_model_path": str(tmp_path / "none")})


def test_weights_of_an_id_are_those_of_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, *, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        return str(adapter(tmp_path / str(revision), str(revision).encode()))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    assert weights_of("a/b", "1") != weights_of("a/b", "2")


@pytest.mark.parametrize(
    "name", ["dp_rank", "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size"]
)
def test_each_rank_has_a_folder_of_its_own(name: str) -> None:
    one, other = (SimpleNamespace(**{**CONFIG, "dp_rank": 0, **change}) for change in ({}, {name: 3}))

    assert folder_of("/disk", one) != folder_of("/disk", other)
    assert folder_of("/disk", one).parent == Path("/disk")


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedEngine, match=r"lora_paths: .*empty cannot be read"):
        namespace({"lora_paths": [f"legal={tmp_path / 'empty'}"]})


def test_weights_are_those_of_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    one = weights_of(str(tmp_path), None)
    (tmp_path / "model.safetensors").write_bytes(b"two")

    assert weights_of(str(tmp_path), None) != one
    with pytest.raises(UnsupportedEngine, match="cannot determine which weights"):
        weights_of(str(tmp_path / "none"), None)


def test_names_are_made_of_sglangs_hashes() -> None:
    assert names_of(["ab"]) == [hashlib.sha256(b"kvtier sglang page\0ab").digest()]


# What this process's server says: a stand-in for SGLang's module.


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = ["sglang", "sglang.srt", "sglang.srt.runtime_context"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return sys.modules[names[-1]]


def test_options_are_read_as_sglang_has_resolved_them(runtime: Any) -> None:
    arguments = SimpleNamespace(dtype="auto", resolved_dict=lambda: {"dtype": "bfloat16"})
    runtime.get_server_args = lambda: arguments
    runtime.get_serving = lambda: SimpleNamespace(weight_version="step 3")

    read = option_reader()

    assert (read("dtype"), read("of another version"), weights_version()) == ("bfloat16", None, "step 3")


def test_a_sglang_that_does_not_say_its_options_is_refused(runtime: Any) -> None:
    def unset() -> None:
        raise ValueError("Global server args is not set yet!")

    with pytest.raises(UnsupportedEngine, match=r"does not reveal its options .*tested version: 0\.5\.23"):
        option_reader()
    runtime.get_server_args = unset
    with pytest.raises(UnsupportedEngine, match="is not set yet"):
        option_reader()
    assert weights_version() is None


def called_by_a_thread_of_its_own(threads: StorageThreads) -> bool:
    said: list[bool] = []
    thread = Thread(target=lambda: said.append(threads.any_ended()))
    thread.start()
    thread.join()
    return said[0]


def test_threads_that_have_ended_show_a_reset_once() -> None:
    threads = StorageThreads()
    assert not threads.any_ended()
    assert not threads.any_ended()
    assert not called_by_a_thread_of_its_own(threads), "it is new, and none has ended"

    assert called_by_a_thread_of_its_own(threads)
    assert threads.any_ended()
    assert not threads.any_ended()


# The real SGLang.


@needs_sglang
@pytest.mark.engines
def test_the_real_sglang_has_no_option_that_nobody_has_judged() -> None:
    import foreign.bare_sglang  # noqa: F401  # it makes the next one importable
    from sglang.srt.server_args import ServerArgs

    options = list(ServerArgs.__struct_fields__)

    assert JUDGED.unclassified(options) == []
    assert JUDGED.classified - set(options) == set()
