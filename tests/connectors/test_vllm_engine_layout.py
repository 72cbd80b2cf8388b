"""vLLM's groups as the connector sees them, what is in the namespace, and what is refused at the start."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvtier.connectors.vllm_connector import engine_layout
from kvtier.connectors.vllm_connector.build_scheduler_half import Settings, settings_of
from kvtier.connectors.vllm_connector.engine_layout import GroupLayout, UnsupportedEngine, group_layouts, namespace_of
from kvtier.connectors.vllm_connector.known_vllm import HOOKS, check_engine
from kvtier.tiers.naming.groups import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow


# Named as vLLM's, with what the connector reads of them: the shapes of vLLM 0.32.
@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 1024
    max_tp_shards: int | None = None


@dataclass(frozen=True)
class SlidingWindowSpec:
    block_size: int = 16
    page_size_bytes: int = 1024
    sliding_window: int = 512
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 1024
    attention_chunk_size: int = 8192


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = 16
    page_size_bytes: int = 1024  # with padding
    shapes: tuple[tuple[int, ...], ...] = ((3, 20), (4, 4, 8))
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    mamba_cache_mode: str = "align"
    tp_replicated: bool = False


@dataclass(frozen=True)
class CrossAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 1024


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    block_size: int = 16


@dataclass
class Group:
    kv_cache_spec: Any
    layer_names: list[str] = field(default_factory=lambda: ["a", "b"])
    is_eagle_group: bool = False


@dataclass
class Config:
    """Anything that has the fields that it is given."""

    kv_cache_groups: list[Group] = field(default_factory=list)
    hash_block_size: int | None = 16


def test_each_kind_of_group_needs_what_its_layers_read() -> None:
    config = Config([Group(FullAttentionSpec()), Group(SlidingWindowSpec()), Group(ChunkedLocalAttentionSpec())])

    layouts = group_layouts(config, num_ranks=2)

    assert [layout.attention for layout in layouts] == [
        FullAttention(16),
        SlidingWindow(16, 512),
        ChunkedLocal(16, 8192),
    ]
    assert [layout.block_bytes for layout in layouts] == [4096] * 3
    assert layouts[0].rank_bytes == 2048


@pytest.mark.parametrize(
    ("shards", "num_ranks", "replicas"), [(1, 4, 4), (2, 4, 2), (8, 4, 1), (None, 4, 1), (4, 6, 1)]
)
def test_pages_that_several_ranks_hold_alike_are_in_a_block_once(
    shards: int | None, num_ranks: int, replicas: int
) -> None:
    (layout,) = group_layouts(Config([Group(FullAttentionSpec(max_tp_shards=shards))]), num_ranks)

    assert layout.num_replicas == replicas
    assert layout.block_bytes == 2048 * num_ranks // replicas
    assert sum(map(layout.is_stored_by, range(num_ranks))) * layout.rank_bytes == layout.block_bytes


def test_a_state_that_all_ranks_compute_is_in_a_block_once() -> None:
    layouts = group_layouts(Config([Group(MambaSpec(tp_replicated=True)), Group(MambaSpec())]), num_ranks=2)

    assert [layout.num_replicas for layout in layouts] == [2, 1]


def test_a_window_keeps_the_tokens_that_a_drafter_needs_beyond_it() -> None:
    (layout,) = group_layouts(Config([Group(SlidingWindowSpec(extra_retained_tokens=2))]), num_ranks=1)

    assert layout.attention == SlidingWindow(16, 514)


@pytest.mark.parametrize(
    ("marked", "has_drafter", "expected"),
    [
        ([False, True, False], True, [False, True, False]),
        ([False, False, False], True, [True, True, False]),  # a drafter's layers are like the others
        ([False, False, False], False, [False, False, False]),
    ],
)
def test_groups_with_a_drafters_layers_are_those_that_vllm_marks_or_any_but_states(
    marked: list[bool], has_drafter: bool, expected: list[bool]
) -> None:
    specs = [FullAttentionSpec(), FullAttentionSpec(), MambaSpec()]
    groups = [Group(spec, is_eagle_group=mark) for spec, mark in zip(specs, marked, strict=True)]

    layouts = group_layouts(Config(groups), num_ranks=1, depends_on_next=has_drafter)

    assert [layout.depends_on_next for layout in layouts] == expected


def test_layers_of_one_group_may_have_pages_of_several_sizes() -> None:
    specs = {"a": FullAttentionSpec(page_size_bytes=1024), "b": FullAttentionSpec(page_size_bytes=256)}

    (layout,) = group_layouts(Config([Group(UniformTypeKVCacheSpecs(specs))]), num_ranks=1)

    assert layout.page_bytes == (1024, 256)


def test_a_recurrent_state_is_a_block_without_vllms_padding() -> None:
    (layout,) = group_layouts(Config([Group(MambaSpec())]), num_ranks=2)

    assert layout.attention == RecurrentState(16)
    assert layout.page_bytes == (3 * 20 * 2 + 4 * 4 * 8 * 4,) * 2


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([Group(CrossAttentionSpec())], "vLLM's kind CrossAttentionSpec"),
        (
            [Group(MambaSpec(mamba_cache_mode="all"))],
            'mamba_cache_mode "all".*start vLLM with --mamba-cache-mode align',
        ),
        ([], "no KV cache"),
        (
            [
                Group(
                    UniformTypeKVCacheSpecs(
                        {"a": SlidingWindowSpec(sliding_window=1), "b": SlidingWindowSpec(sliding_window=2)}
                    )
                )
            ],
            "different attention windows",
        ),
    ],
)
def test_groups_that_cannot_be_served_are_refused_with_a_sentence(groups: list[Group], why: str) -> None:
    with pytest.raises(UnsupportedEngine, match=why):
        group_layouts(Config(groups), num_ranks=1)


LAYOUT = GroupLayout(FullAttention(16), ("a",), (1024,), 1)


def test_all_that_decides_a_blocks_bytes_is_in_the_namespace() -> None:
    facts, spec = {"weights": "w", "dtype": "bf16"}, FullAttentionSpec()
    others = [
        namespace_of({**facts, "weights": "v"}, [LAYOUT], [spec]),
        namespace_of({**facts, "dtype": "fp16"}, [LAYOUT], [spec]),
        namespace_of(facts, [GroupLayout(FullAttention(16), ("b",), (1024,), 1)], [spec]),
        namespace_of(facts, [GroupLayout(FullAttention(16), ("a",), (512,), 1)], [spec]),
        namespace_of(facts, [GroupLayout(FullAttention(16), ("a",), (1024,), 2)], [spec]),
        namespace_of(facts, [GroupLayout(FullAttention(16), ("a",), (1024,), 2, num_replicas=2)], [spec]),
        namespace_of(facts, [GroupLayout(SlidingWindow(16, 64), ("a",), (1024,), 1)], [spec]),
        namespace_of(facts, [GroupLayout(SlidingWindow(16, 128), ("a",), (1024,), 1)], [spec]),
        namespace_of(facts, [LAYOUT], [FullAttentionSpec(page_size_bytes=1)]),
        namespace_of(facts, [LAYOUT], [spec]),
    ]

    assert len(set(others)) == len(others)
    assert all(len(namespace) == 16 for namespace in others)


def test_blocks_of_another_version_of_the_layout_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespace_of({}, [LAYOUT], [])
    monkeypatch.setattr(engine_layout, "VERSION", engine_layout.VERSION + 1)

    assert namespace_of({}, [LAYOUT], []) != before


def test_an_object_that_says_where_it_is_in_memory_changes_no_namespace() -> None:
    class Said:
        def __repr__(self) -> str:
            return f"Said(<function f at {hex(id(self))}>)"

    first, second = Said(), Said()

    assert namespace_of({}, [LAYOUT], [first]) == namespace_of({}, [LAYOUT], [second])


@dataclass
class Options:
    """A part of vLLM's configuration."""

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 2
    decode_context_parallel_size: int = 1
    kv_role: str = "kv_both"
    prefix_caching_hash_algo: str = "sha256"


@dataclass
class Speculation:
    """vLLM's `SpeculativeConfig`."""

    method: str
    draft_tensor_parallel_size: int | None = None


@dataclass
class VllmConfig:
    """As much of vLLM's as is looked at."""

    parallel_config: Options = field(default_factory=Options)
    cache_config: Options = field(default_factory=Options)
    kv_transfer_config: Options = field(default_factory=Options)
    speculative_config: object = None


Known = type("Known", (), dict.fromkeys(HOOKS))


@pytest.mark.parametrize("speculation", [None, Speculation("ngram"), Speculation("eagle", 2), Speculation("mtp")])
def test_an_engine_as_it_should_be_is_served(speculation: Speculation | None) -> None:
    check_engine(Known, VllmConfig(speculative_config=speculation), Config())


@pytest.mark.parametrize(
    ("base", "config", "why"),
    [
        (object, VllmConfig(), "this vLLM has no build_connector_worker_meta.*tested versions: 0.32"),
        (Known, VllmConfig(parallel_config=Options(pipeline_parallel_size=2)), "pipeline parallelism"),
        (Known, VllmConfig(parallel_config=Options(decode_context_parallel_size=2)), "decode_context_parallel_size"),
        (
            Known,
            VllmConfig(speculative_config=Speculation("medusa")),
            'speculative decoding by "medusa"; it serves ngram',
        ),
        (Known, VllmConfig(speculative_config=Speculation("eagle", 1)), "only some tensor parallel ranks compute"),
        (Known, VllmConfig(kv_transfer_config=Options(kv_role="kv_producer")), '"kv_role":"kv_both"'),
        (Known, VllmConfig(cache_config=Options(prefix_caching_hash_algo="xxhash")), "use sha256 or sha256_cbor"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_with_a_sentence(base: type, config: Any, why: str) -> None:
    with pytest.raises(UnsupportedEngine, match=why):
        check_engine(base, config, Config())


def test_settings_have_a_socket_a_deadline_and_what_stands_for_weights() -> None:
    assert settings_of({"sidecar": "unix:///run/k.sock"}) == Settings(sidecar="/run/k.sock", deadline_ms=300)
    assert settings_of({"sidecar": "/k", "deadline_ms": 50, "weights": "r1"}).weights == "r1"


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({}, "missing required field `sidecar`"),
        ({"sidecar": ""}, "length >= 1"),
        ({"sidecar": "/k", "deadline": 1}, "unknown field `deadline`"),
        ({"sidecar": "/k", "deadline_ms": 0}, "> 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(extra: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        settings_of(extra)
