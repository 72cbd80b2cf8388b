"""The names of a key's chunks, however its tokens come."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from lmcache_bed import CHUNK, FORMS, in_form, key

from kvtier.sidecar.lmcache import token_encoding, token_keys
from kvtier.sidecar.lmcache.token_encoding import ARRAY, Tokens, tokens_of
from kvtier.sidecar.lmcache.token_keys import TokenKeys
from kvtier.sidecar.lmcache.wire import OPERATIONS, Refused
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys


def raw(token_ids: list[int], form: str = "0.5.6") -> Tokens:
    """As a key has them."""
    (own,) = in_form(form, "lookup", [key(token_ids, "r", end=0)])
    return tokens_of(OPERATIONS[8].decode([msgspec.msgpack.encode(own), b"\1"])[0])


def expected(token_ids: list[int], salt: str = "") -> list[BlockName]:
    chain = BlockChain(CHUNK, ExtraKeys(cache_salt=salt or None))
    chain.extend(token_ids)
    return chain.names


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many token ids were decoded, each time that some were."""
    found: list[int] = []
    decode = token_encoding.decode_ids

    def counted(data: bytes) -> list[int]:
        found.append(int.from_bytes(data[1:5], "big"))
        return decode(data)

    monkeypatch.setattr(token_encoding, "decode_ids", counted)
    return found


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks got a name, each time that some did."""
    found: list[int] = []
    extend = BlockChain.extend

    def counted(chain: BlockChain, token_ids: Sequence[int]) -> None:
        before = len(chain.names)
        extend(chain, token_ids)
        found.append(len(chain.names) - before)

    monkeypatch.setattr(BlockChain, "extend", counted)
    return found


def any_ids(rng: random.Random, num: int) -> list[int]:
    return [
        rng.choice([rng.randrange(128), rng.randrange(256), rng.randrange(1 << 16), rng.getrandbits(32)])
        for _ in range(num)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_names_are_those_of_the_tokens_whatever_came_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(token_keys, "BEGINNING_BYTES", rng.choice([8, 40]))
    keys = TokenKeys(CHUNK, 60_000)
    prompts = {request: any_ids(rng, rng.choice([0, 5, 15, 16, 60, 300])) for request in "abcdef"}
    for _ in range(400):
        request = rng.choice("abcdef")
        ids = prompts[request]
        match rng.randrange(8):
            case 0:
                ids += any_ids(rng, rng.randrange(40))
            case 1:
                ids = ids[: rng.randrange(len(ids) + 1)]
            case 2 if ids:
                ids = ids[:]
                ids[rng.randrange(len(ids))] ^= 1
            case 3:
                keys.forget(request)
            case 4:
                ids = prompts[request] = prompts[rng.choice("abcdef")][: rng.randrange(300)]
            case 5 if rng.random() < 0.1:
                keys.drop_ended()
        salt = rng.choice(["", "", "", "tenant"])

        assert list(keys.names(request, salt, raw(ids, rng.choice(FORMS)))) == expected(ids, salt)
        keys.check()
        assert keys.num_bytes <= 60_000


@pytest.mark.parametrize("num_words", [1, 2 * CHUNK])
def test_equal_bytes_in_the_two_encodings_are_two_prompts(num_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_keys, "BEGINNING_BYTES", 4)
    short = [1] * num_words  # packed: 00 00 00 01 …
    long = [0, 0, 0, 1] * num_words  # as elements of an array: the same bytes
    assert raw(short, "0.5.7").body == raw(long, "0.5.6").body
    keys = TokenKeys(CHUNK)
    for _ in range(2):
        assert list(keys.names("r", "", raw(short, "0.5.7"))) == expected(short)
        assert list(keys.names("r", "", raw(long, "0.5.6"))) == expected(long)  # the same request
        assert list(keys.names("s", "", raw(short, "0.5.7"))) == expected(short)  # another one
        keys.check()


def test_packed_tokens_of_the_same_document_are_named_once(monkeypatch: pytest.MonkeyPatch, hashed: list[int]) -> None:
    monkeypatch.setattr(token_keys, "BEGINNING_BYTES", 64)
    keys, document = TokenKeys(CHUNK), any_ids(random.Random(1), 10 * CHUNK + 3)
    for request, number in (("a", 0), ("b", 500)):
        question = [*document, *range(number, number + 2 * CHUNK)]
        assert list(keys.names(request, "", raw(question, "0.5.7"))) == expected(question)

    assert hashed[::2] == [12, 2]  # what is expected is hashed here too


def test_only_what_is_new_is_decoded(decoded: list[int]) -> None:
    keys, ids = TokenKeys(CHUNK), list(range(1000, 1100))
    for upto in (80, 80, 60, 80, 100):
        keys.names("r", "", raw(ids[:upto]))

    assert decoded == [80, 20]


def test_what_another_request_has_begun_with_is_not_decoded_again(
    monkeypatch: pytest.MonkeyPatch, decoded: list[int]
) -> None:
    monkeypatch.setattr(token_keys, "BEGINNING_BYTES", 64)
    keys, document = TokenKeys(CHUNK), any_ids(random.Random(1), 10 * CHUNK + 3)
    questions = [[*document, *range(number, number + 2 * CHUNK)] for number in (0, 500, 900)]
    assert list(keys.names("a", "", raw(questions[0]))) == expected(questions[0])
    assert list(keys.names("b", "", raw(questions[1]))) == expected(questions[1])  # beside the first
    keys.forget("a")
    keys.forget("b")
    assert list(keys.names("c", "", raw(questions[2]))) == expected(questions[2])  # after both
    assert list(keys.names("d", "other salt", raw(questions[2]))) == expected(questions[2], "other salt")

    whole, question = len(questions[0]), 3 + 2 * CHUNK
    assert decoded == [whole, question, question, whole]


def test_of_requests_that_are_over_the_last_of_each_document_is_kept() -> None:
    keys = TokenKeys(CHUNK)
    document = list(range(1000, 1400))
    for request in "abc":
        keys.names(request, "", raw([*document, ord(request)]))
        keys.forget(request)
        keys.check()
    one = keys.num_bytes
    keys.names("short", "", raw(document[:CHUNK]))
    keys.forget("short")

    assert 0 < keys.num_bytes == one < 20_000
    keys.drop_ended()
    assert keys.num_bytes == 0


def test_what_is_kept_of_requests_that_are_over_has_a_bound(
    monkeypatch: pytest.MonkeyPatch, decoded: list[int]
) -> None:
    monkeypatch.setattr(token_keys, "MAX_OVER_BYTES", 50_000)
    keys = TokenKeys(CHUNK)
    for number in range(20):
        keys.names("r", "", raw([number, *range(1000, 1400)]))
        keys.forget("r")
        keys.check()
        if number:  # the first document is asked about again and again
            keys.names("again", "", raw([0, *range(1000, 1400)]))
            keys.forget("again")

    assert 40_000 < keys.num_bytes <= 50_000
    decoded.clear()
    keys.names("again", "", raw([0, *range(1000, 1400)]))
    assert decoded == [401 % CHUNK]


def test_a_number_that_is_longer_than_it_must_be_is_never_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_keys, "BEGINNING_BYTES", 8)
    ids = [300, *[5] * (2 * CHUNK)]
    longer = Tokens(ARRAY, b"\xce\0\0\x01\x2c" + bytes([5]) * (2 * CHUNK), len(ids))
    keys = TokenKeys(CHUNK)
    assert list(keys.names("a", "", longer)) == expected(ids)
    assert list(keys.names("b", "", longer)) == expected(ids)
    assert list(keys.names("c", "", raw(ids))) == expected(ids)
    keys.check()


@pytest.mark.parametrize("ids", [[1 << 32], [-1], [1, None], ["1"], [1.5], [[1]], "abc", {"a": 1}, None, 7])
def test_what_are_no_token_ids_is_refused(ids: object) -> None:
    keys = TokenKeys(CHUNK)
    with pytest.raises(Refused):
        keys.names("r", "", raw(ids))  # type: ignore[arg-type]
    keys.check()
    assert list(keys.names("r", "", raw(list(range(20))))) == expected(list(range(20)))


def test_a_long_key_is_decoded_and_hashed_once(decoded: list[int], hashed: list[int]) -> None:
    rng = random.Random(1)
    encoded = msgspec.msgpack.encode(key([rng.randrange(128_000) for _ in range(131_072)], "r"))
    keys = TokenKeys(256)

    for request in ["r"] * 6 + ["another"]:
        (own, _) = OPERATIONS[8].decode([encoded, b"\1"])
        assert len(keys.names(request, "", tokens_of(own))) == 512

    assert decoded == [131_072]
    assert hashed == [512]
