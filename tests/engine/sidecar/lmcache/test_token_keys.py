"""The names of a key's chunks, however its tokens come."""

import random
import time

import msgspec
import pytest
from lmcache_bed import CHUNK, key

from kvtier.engine.sidecar.lmcache import token_keys
from kvtier.engine.sidecar.lmcache.token_keys import TokenKeys
from kvtier.engine.sidecar.lmcache.wire import OPERATIONS, Refused
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys


def raw(token_ids: list[int]) -> msgspec.Raw:
    """As a key has them."""
    encoded = msgspec.msgpack.encode(key(token_ids, "r", end=0))
    return OPERATIONS[8].decode([encoded, b"\1"])[0].token_ids


def expected(token_ids: list[int], salt: str = "") -> list[BlockName]:
    chain = BlockChain(CHUNK, ExtraKeys(cache_salt=salt or None))
    chain.extend(token_ids)
    return chain.names


def any_ids(rng: random.Random, num: int) -> list[int]:
    return [
        rng.choice([rng.randrange(128), rng.randrange(256), rng.randrange(1 << 16), rng.getrandbits(32)])
        for _ in range(num)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_names_are_those_of_the_tokens_whatever_came_before(seed: int) -> None:
    rng = random.Random(seed)
    keys = TokenKeys(CHUNK, 60_000)
    prompts = {request: any_ids(rng, rng.choice([0, 5, 15, 16, 60, 300])) for request in "abcdef"}
    for _ in range(400):
        request = rng.choice("abcdef")
        ids = prompts[request]
        match rng.randrange(6):
            case 0:
                ids += any_ids(rng, rng.randrange(40))
            case 1:
                ids = ids[: rng.randrange(len(ids) + 1)]
            case 2 if ids:
                ids = ids[:]
                ids[rng.randrange(len(ids))] ^= 1
            case 3:
                keys.forget(request)
        salt = rng.choice(["", "", "", "tenant"])

        assert list(keys.names(request, salt, raw(ids))) == expected(ids, salt)
        keys.check()
        assert keys.num_bytes <= 60_000


def test_only_what_is_new_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = token_keys.decode_ids

    def counted(data: bytes) -> list[int]:
        decoded.append(int.from_bytes(data[1:5], "big"))
        return decode(data)

    monkeypatch.setattr(token_keys, "decode_ids", counted)
    keys, ids = TokenKeys(CHUNK), list(range(1000, 1100))
    for upto in (80, 80, 60, 80, 100):
        keys.names("r", "", raw(ids[:upto]))

    assert decoded == [80, 20]


def test_a_request_that_is_over_leaves_nothing() -> None:
    keys = TokenKeys(CHUNK)
    keys.names("r", "", raw(list(range(100))))
    assert keys.num_bytes > 0

    keys.forget("r")

    assert keys.num_bytes == 0


@pytest.mark.parametrize("ids", [[1 << 32], [-1], [1, None], ["1"], [1.5], [[1]], "abc", {"a": 1}, None, 7])
def test_what_are_no_token_ids_is_refused(ids: object) -> None:
    keys = TokenKeys(CHUNK)
    with pytest.raises(Refused):
        keys.names("r", "", raw(ids))  # type: ignore[arg-type]
    keys.check()
    assert list(keys.names("r", "", raw(list(range(20))))) == expected(list(range(20)))


@pytest.mark.long
def test_a_long_key_is_read_once() -> None:
    rng = random.Random(1)
    encoded = msgspec.msgpack.encode(key([rng.randrange(128_000) for _ in range(131_072)], "r"))
    keys = TokenKeys(256)
    took: list[float] = []
    for _ in range(6):
        begun = time.perf_counter()
        (own, _) = OPERATIONS[8].decode([encoded, b"\1"])
        assert len(keys.names("r", "", own.token_ids)) == 512
        took.append(time.perf_counter() - begun)

    assert min(took[1:]) < took[0] / 3
