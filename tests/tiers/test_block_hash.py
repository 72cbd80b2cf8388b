"""Names of blocks: the documented bytes are hashed, nothing else decides a name, and no two prompts share one."""

import hashlib
import itertools
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import xxhash

from kvtier.tiers.block_hash import (
    BlockChain,
    BlockName,
    ExtraKeys,
    HashAlgorithm,
    Lora,
    MultimodalItem,
    TokenIds,
    hash_blocks,
    root_name,
)

ROOT = root_name(HashAlgorithm.SHA256, "kvtier")
IMAGES = (MultimodalItem("aaa", 11, 10), MultimodalItem("bbb", 30, 18))


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()


def tagged(*parts: bytes) -> bytes:
    """Extra keys as the format has them: each part after its length."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def documented_names(
    digest: Callable[[bytes], bytes], parent: bytes, token_ids: Sequence[int], block_size: int, extras: Sequence[bytes]
) -> list[bytes]:
    names: list[bytes] = []
    for block_id, extra in enumerate(extras):
        block = token_ids[block_id * block_size : (block_id + 1) * block_size]
        names.append(digest((names[-1] if names else parent) + struct.pack(f"<{block_size}I", *block) + extra))
    return names


def names_of(token_ids: TokenIds, extra: ExtraKeys | None = None, block_size: int = 16) -> list[BlockName]:
    return hash_blocks(token_ids, block_size, extra or ExtraKeys(), parent=ROOT)


def num_equal_from_the_left(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# --- the format


@pytest.mark.parametrize(("algorithm", "digest"), [(HashAlgorithm.SHA256, sha256), (HashAlgorithm.XXH3_128, xxh3_128)])
def test_a_name_is_the_hash_of_parent_and_little_endian_token_ids(
    algorithm: HashAlgorithm, digest: Callable[[bytes], bytes]
) -> None:
    token_ids = [0, 1, 255, 256, 70_000, 2**31, 2**32 - 1, 5, 128_000]
    root = digest(b"kvtier:" + algorithm.value.encode() + b":kvtier")

    names = hash_blocks(token_ids, 4, parent=root_name(algorithm, "kvtier"), algorithm=algorithm)

    assert names == documented_names(digest, root, token_ids, 4, [b"", b""])


@pytest.mark.parametrize(
    ("algorithm", "third"),
    [
        (HashAlgorithm.SHA256, "6c2d90a99952c18e50950d47e0c290c270e5d1724c08ab7c01b68031c50772f7"),
        (HashAlgorithm.XXH3_128, "01baa8e8c8cd131ba035ade18118c89b"),
    ],
    ids=["sha256", "xxh3_128"],
)
def test_names_stay_what_they_are_in_the_stores_already_written(algorithm: HashAlgorithm, third: str) -> None:
    chain = BlockChain(16, algorithm=algorithm)

    chain.extend([0] * 16 + [1] * 16 + [2] * 16)

    assert chain.names[2].hex() == third  # on disk: for ever


def test_the_name_of_a_block_with_every_extra_key_is_the_documented_one() -> None:
    embeddings = np.arange(24, dtype=np.float32).reshape(8, 3)
    extra = ExtraKeys(Lora("ad", "/p"), (MultimodalItem("img", 2, 4),), "salt", embeddings)
    first = tagged(b"lora", b"ad", b"/p", b"mm", b"img", struct.pack("<q", 2), b"cache_salt", b"salt")
    second = tagged(b"lora", b"ad", b"/p", b"mm", b"img", struct.pack("<q", -2))
    digests = [tagged(b"prompt_embeds", sha256(embeddings[start : start + 4].tobytes())) for start in (0, 4)]

    names = names_of(range(8), extra, block_size=4)

    assert names == documented_names(sha256, ROOT, range(8), 4, [first + digests[0], second + digests[1]])


# --- what is given in


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8"])
def test_an_array_of_any_integer_type_gives_the_names_of_the_list(dtype: str) -> None:
    token_ids = list(range(0, 128, 2))

    names = names_of(np.array(token_ids, dtype=dtype))

    assert names == names_of(token_ids)


@pytest.mark.parametrize("of", [tuple, list, lambda ids: [np.int64(i) for i in ids]], ids=["tuple", "list", "numpy"])
def test_any_sequence_of_ints_gives_the_same_names(of: Callable[[range], Sequence[int]]) -> None:
    assert names_of(of(range(64))) == names_of(range(64))


def test_an_array_with_strides_gives_the_names_of_its_elements() -> None:
    assert names_of(np.arange(128)[::2]) == names_of(list(range(0, 128, 2)))


@pytest.mark.parametrize("token_id", [-1, -(2**31), 2**32, 2**63])
@pytest.mark.parametrize("position", [0, 15])
@pytest.mark.parametrize("of", [list, np.array], ids=["list", "array"])
def test_a_token_id_beyond_32_bits_raises(of: Callable[[list[int]], TokenIds], position: int, token_id: int) -> None:
    token_ids = [7] * 16
    token_ids[position] = token_id

    with pytest.raises(OverflowError):
        names_of(of(token_ids))


@pytest.mark.parametrize("of", [list, np.array], ids=["list", "array"])
def test_the_least_and_the_greatest_token_id_are_different_names(of: Callable[[list[int]], TokenIds]) -> None:
    names = {names_of(of([token_id] * 16))[0] for token_id in (0, 1, 2**16, 2**31, 2**32 - 1)}

    assert len(names) == 5


# --- the chain


@pytest.mark.parametrize(("num_tokens", "num_names"), [(0, 0), (1, 0), (15, 0), (16, 1), (31, 1), (32, 2), (55, 3)])
def test_a_trailing_partial_block_has_no_name(num_tokens: int, num_names: int) -> None:
    assert names_of(range(num_tokens)) == names_of(range(1000))[:num_names]


@pytest.mark.parametrize("seed", range(5))
def test_names_are_equal_exactly_as_far_as_the_prompts_are(seed: int) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    for _ in range(200):
        block_size = pick.choice([1, 2, 16])
        one, other = ([pick.randrange(2) for _ in range(pick.randrange(60))] for _ in range(2))
        num_shared = pick.randrange(60)
        other[:num_shared] = one[:num_shared]
        num_equal_tokens = num_equal_from_the_left(one, other)

        names = names_of(one, block_size=block_size), names_of(other, block_size=block_size)

        assert num_equal_from_the_left(*names) == num_equal_tokens // block_size
        assert len(set(names[0]) | set(names[1])) == sum(map(len, names)) - num_equal_tokens // block_size


@pytest.mark.parametrize("position", [0, 15, 16, 40, 63])
def test_a_changed_token_changes_its_block_s_name_and_all_later_ones(position: int) -> None:
    token_ids = list(range(64))
    changed = token_ids.copy()
    changed[position] = 1000

    different = [a != b for a, b in zip(names_of(token_ids), names_of(changed), strict=True)]

    assert different == [block_id >= position // 16 for block_id in range(4)]


def test_equal_blocks_at_different_places_have_different_names() -> None:
    assert len(set(names_of([7] * 160))) == 10


def test_naming_may_go_on_from_any_block() -> None:
    token_ids = list(range(80))
    extra = ExtraKeys(Lora("ad", "/p"), IMAGES, "salt", np.ones((80, 2), np.float32))
    names = names_of(token_ids, extra)

    rest = hash_blocks(token_ids[32:], 16, extra, parent=names[1], start=32)

    assert rest == names[2:]


@pytest.mark.parametrize("algorithm", HashAlgorithm)
@pytest.mark.parametrize("seed", range(20))
def test_a_chain_grown_bit_by_bit_has_the_names_of_one_call(seed: int, algorithm: HashAlgorithm) -> None:
    print(f"seed {seed}")
    pick = random.Random(seed)
    block_size = pick.choice([1, 3, 16])
    token_ids = [pick.randrange(2**32) for _ in range(200)]
    extra = ExtraKeys(Lora("ad", "/p"), IMAGES, "salt", np.random.default_rng(seed).random((150, 4)))
    chain = BlockChain(block_size, extra, algorithm=algorithm, seed="s")
    num_tokens = 0
    while num_tokens < len(token_ids):
        num_tokens = min(len(token_ids), num_tokens + pick.choice([0, 1, 1, 2, 15, 16, 17, 40]))

        chain.extend(token_ids[:num_tokens])

        assert len(chain.names) == num_tokens // block_size
    parent = root_name(algorithm, "s")
    assert chain.names == hash_blocks(token_ids, block_size, extra, parent=parent, algorithm=algorithm)


def test_a_chain_takes_arrays_as_well() -> None:
    chain = BlockChain(16)

    for num_tokens in (10, 40, 64):
        chain.extend(np.arange(num_tokens))

    assert chain.names == names_of(range(64))


# --- seeds


def test_the_seed_decides_every_name() -> None:
    chains = [BlockChain(16, seed=seed) for seed in ("one", "two")]

    for chain in chains:
        chain.extend(range(64))

    assert len(set(chains[0].names + chains[1].names)) == 8


def test_names_do_not_depend_on_python_s_own_hash_seed() -> None:
    program = """
from kvtier.tiers.block_hash import BlockChain, ExtraKeys, Lora, MultimodalItem
chain = BlockChain(4, ExtraKeys(Lora("ad", "/p"), (MultimodalItem("img", 2, 4),), "salt"))
chain.extend(range(16))
print(b"".join(chain.names).hex())
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for hash_seed in ("0", "4242")
    ]

    extra = ExtraKeys(Lora("ad", "/p"), (MultimodalItem("img", 2, 4),), "salt")
    assert outputs == [b"".join(names_of(range(16), extra, block_size=4)).hex()] * 2


# --- extra keys


def test_the_salt_is_in_the_first_block_only_and_changes_every_name() -> None:
    salted = names_of(range(48), ExtraKeys(cache_salt="s1"))

    assert salted == documented_names(sha256, ROOT, range(48), 16, [tagged(b"cache_salt", b"s1"), b"", b""])
    assert not set(salted) & set(names_of(range(48)))


@pytest.mark.parametrize("other", [None, "", "s2"])
def test_another_salt_shares_no_block(other: str | None) -> None:
    salted = names_of(range(48), ExtraKeys(cache_salt="s1"))

    assert not set(salted) & set(names_of(range(48), ExtraKeys(cache_salt=other)))
    assert salted == names_of(range(48), ExtraKeys(cache_salt="s1"))


@pytest.mark.parametrize("other", [None, Lora("ad", "/other"), Lora("other", "/p"), Lora("/p", "ad"), Lora("", "ad/p")])
def test_the_adapter_s_name_and_path_are_in_every_block(other: Lora | None) -> None:
    extra = ExtraKeys(Lora("ad", "/p"))

    assert [extra.of_block(start, start + 16) for start in (0, 16, 32)] == [tagged(b"lora", b"ad", b"/p")] * 3
    assert not set(names_of(range(48), extra)) & set(names_of(range(48), ExtraKeys(other)))


def test_images_are_in_the_blocks_they_overlap_with_their_offset_from_the_block() -> None:  # scenario S28
    keys = [ExtraKeys(multimodal=IMAGES).of_block(start, start + 16) for start in (0, 16, 32, 48)]

    assert keys == [
        tagged(b"mm", b"aaa", struct.pack("<q", 11)),
        tagged(b"mm", b"aaa", struct.pack("<q", -5), b"mm", b"bbb", struct.pack("<q", 14)),
        tagged(b"mm", b"bbb", struct.pack("<q", -2)),
        b"",
    ]


@pytest.mark.parametrize(
    ("offset", "num_tokens", "blocks"),
    [(0, 16, [0]), (15, 1, [0]), (16, 16, [1]), (15, 2, [0, 1]), (31, 18, [1, 2, 3])],
)
def test_an_image_is_in_exactly_the_blocks_with_one_of_its_tokens(
    offset: int, num_tokens: int, blocks: list[int]
) -> None:
    extra = ExtraKeys(multimodal=(MultimodalItem("img", offset, num_tokens),))

    assert [block for block in range(5) if extra.of_block(16 * block, 16 * block + 16)] == blocks


def test_another_image_changes_the_names_from_its_first_block_on() -> None:
    one, other = (ExtraKeys(multimodal=(MultimodalItem(identifier, 20, 4),)) for identifier in ("a", "b"))

    assert num_equal_from_the_left(names_of([9] * 64, one), names_of([9] * 64, other)) == 1


def test_an_image_at_another_place_among_equal_placeholders_changes_the_name() -> None:
    one, other = (ExtraKeys(multimodal=(MultimodalItem("a", offset, 4),)) for offset in (4, 5))

    assert names_of([9] * 16, one) != names_of([9] * 16, other)


@pytest.mark.parametrize("row", [0, 15, 16, 47])
def test_prompt_embeddings_count_from_the_block_with_the_changed_row(row: int) -> None:
    embeddings = np.random.default_rng(1).random((48, 8), dtype=np.float32)
    changed = embeddings.copy()
    changed[row, 5] += 1

    one, other = (names_of([0] * 48, ExtraKeys(prompt_embeddings=rows)) for rows in (embeddings, changed))

    assert num_equal_from_the_left(one, other) == row // 16


def test_prompt_embeddings_that_end_early_leave_later_blocks_without_a_key() -> None:
    rows = np.ones((20, 8), np.float16)
    keys = [ExtraKeys(prompt_embeddings=rows).of_block(start, start + 16) for start in (0, 16, 32)]

    assert keys == [tagged(b"prompt_embeds", sha256(rows[i : i + 16].tobytes())) for i in (0, 16)] + [b""]


def test_prompt_embeddings_are_named_by_value_whatever_their_strides() -> None:
    embeddings = np.random.default_rng(1).random((48, 8))

    strided = np.asfortranarray(embeddings)

    assert names_of([0] * 48, ExtraKeys(prompt_embeddings=strided)) == names_of(
        [0] * 48, ExtraKeys(prompt_embeddings=embeddings)
    )


def test_prompt_embeddings_alone_change_the_name() -> None:
    assert names_of([0] * 16, ExtraKeys(prompt_embeddings=np.zeros((16, 4)))) != names_of([0] * 16)


def adversarial_keys() -> Iterator[ExtraKeys]:
    """Keys that read alike once glued together: shifted boundaries, tags as content, content that looks encoded."""
    text = ["", "a", "aa", "lora", "mm", "cache_salt", "a\x02\x00\x00\x00mm", "\x04\x00\x00\x00lora"]
    loras = [None, *itertools.starmap(Lora, itertools.product(text, repeat=2))]
    items = [MultimodalItem(identifier, offset, 20) for identifier in text for offset in (0, 1)]
    images: list[tuple[MultimodalItem, ...]] = [(), *((item,) for item in items), *itertools.product(items, repeat=2)]
    salts = [None, *text]
    yield from (ExtraKeys(lora, (), salt) for lora in loras for salt in salts)
    yield from (ExtraKeys(None, image, salt) for image in images for salt in salts)
    yield from (ExtraKeys(lora, image) for lora in loras for image in images)


def test_different_extra_keys_never_give_the_same_bytes() -> None:
    keys = set(adversarial_keys())

    assert len(keys) > 10_000
    assert len({key.of_block(0, 16) for key in keys}) == len(keys)
