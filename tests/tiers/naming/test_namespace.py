"""Namespace: a difference in any field is another namespace, and nothing else is."""

import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest

from kvtier.tiers.naming.namespace import GroupGeometry, Namespace

FULL = GroupGeometry(kind="FullAttention", layer_ids=(0, 2), parts=((8, 128), (8, 128)))
SLIDING = GroupGeometry(kind="SlidingWindow:1024", layer_ids=(1, 3), parts=((8, 128), (8, 128)))
NAMESPACE = Namespace(
    model="m",
    config_digest="c",
    weights_digest="w",
    dtype="bfloat16",
    geometry=(FULL, SLIDING),
    block_size=16,
    hash_algorithm="sha256",
    hash_seed="kvtier",
    kv_quantization="none",
    shard_rank=0,
    num_shards=1,
    layout_version=2,
)
OTHER: dict[str, Any] = {
    "model": "m2",
    "config_digest": "c2",
    "weights_digest": "w2",
    "dtype": "float16",
    "geometry": (FULL,),
    "block_size": 32,
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "other",
    "kv_quantization": "fp8",
    "encryption_key_id": "0123456789abcdef",
    "shard_rank": 1,
    "num_shards": 2,
    "layout_version": 3,
}
OTHER_GEOMETRY: dict[str, Any] = {
    "kind": "SlidingWindow:1024",
    "layer_ids": (0, 1),
    "parts": ((8, 128), (8, 64)),
}


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_every_field_changes_the_digest(name: str) -> None:
    assert replace(NAMESPACE, **{name: OTHER[name]}).digest != NAMESPACE.digest


@pytest.mark.parametrize("name", [field.name for field in fields(GroupGeometry)])
def test_every_field_of_a_group_changes_the_digest(name: str) -> None:
    other = replace(FULL, **{name: OTHER_GEOMETRY[name]})

    assert replace(NAMESPACE, geometry=(other, SLIDING)).digest != NAMESPACE.digest


def test_equal_fields_give_the_equal_digest() -> None:
    rebuilt = replace(NAMESPACE, geometry=(replace(FULL), replace(SLIDING)))

    assert rebuilt.digest == NAMESPACE.digest


def test_the_digest_has_sixteen_bytes() -> None:
    assert len(NAMESPACE.digest) == 16


def test_the_digest_stays_what_it_is_in_the_stores_already_written() -> None:
    canonical = (
        '{"block_size":16,"config_digest":"c","dtype":"bfloat16","encryption_key_id":"","geometry":['
        '{"kind":"FullAttention","layer_ids":[0,2],"parts":[[8,128],[8,128]]},'
        '{"kind":"SlidingWindow:1024","layer_ids":[1,3],"parts":[[8,128],[8,128]]}],'
        '"hash_algorithm":"sha256","hash_seed":"kvtier","kv_quantization":"none","layout_version":2,'
        '"model":"m","num_shards":1,"shard_rank":0,"weights_digest":"w"}'
    )

    assert NAMESPACE.digest == hashlib.sha256(canonical.encode()).digest()[:16]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "ab", "weights_digest": "c"}, {"model": "a", "weights_digest": "bc"}),
        ({"model": 'a","weights_digest":"b', "weights_digest": "c"}, {"model": "a", "weights_digest": 'b","c'}),
        ({"shard_rank": 1, "num_shards": 12}, {"shard_rank": 11, "num_shards": 2}),
        ({"geometry": (replace(FULL, layer_ids=(1, 23)),)}, {"geometry": (replace(FULL, layer_ids=(12, 3)),)}),
        ({"geometry": (FULL, SLIDING)}, {"geometry": (SLIDING, FULL)}),
        ({"geometry": (FULL,)}, {"geometry": (FULL, FULL)}),
    ],
)
def test_fields_that_read_alike_when_glued_together_stay_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert replace(NAMESPACE, **one).digest != replace(NAMESPACE, **other).digest
