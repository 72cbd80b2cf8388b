"""The index: random events against a plain model, what is expected and not told of, bounds, kvtier's own events."""

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from kvtier.engine.kv_events import EventEncoder
from kvtier.routing import kv_event
from kvtier.routing.fingerprints import Fingerprints, Prefixes
from kvtier.routing.kv_event import AllBlocksCleared, BlockRemoved, BlockStored
from kvtier.routing.prefix_index import MAX_LOOKED_UP, SWEPT, Matched, PrefixIndex
from kvtier.tiers.naming import events as own
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys, Lora, MultimodalItem
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Tier

SIZE = 16
MEDIA = ("GPU", "CPU", "STORAGE")
PLACES = ("device", "host", "disk")
TIERS = [*zip(MEDIA, PLACES, strict=True)]


def made(max_blocks: int = 10_000, replicas: Sequence[str] = ("a", "b", "c")) -> PrefixIndex:
    index = PrefixIndex(Fingerprints(key=1), max_blocks)
    for replica in replicas:
        index.add(replica)
    return index


def prefixes(
    index: PrefixIndex, tokens: Sequence[int], lora: str | None = None, salt: str | None = None, size: int = SIZE
) -> Prefixes:
    fingerprints = index.fingerprints
    array = np.array(tokens, dtype=np.uint32)
    return Prefixes(fingerprints.chain(fingerprints.root(lora, salt), array, size), size)


def names(tokens: Sequence[int]) -> list[int]:
    """A replica's names of a prompt's blocks."""
    return [hash(tuple(tokens[: end + SIZE])) & (2**64 - 1) for end in range(0, len(tokens) - SIZE + 1, SIZE)]


def stored(tokens: Sequence[int], medium: str = "GPU", first: int = 0, **others: object) -> BlockStored:
    """The event of a prompt's blocks from number *first* on."""
    named = names(tokens)
    full = list(tokens[first * SIZE : len(named) * SIZE])
    return BlockStored(named[first:], named[first - 1] if first else None, full, SIZE, medium, **others)


def test_a_stored_prefix_is_matched_up_to_the_first_other_block() -> None:
    index = made()
    index.learn("a", stored(range(64)))

    assert index.matched(prefixes(index, range(200))) == {"a": Matched(device=64)}
    assert index.matched(prefixes(index, [*range(40), *range(24)])) == {"a": Matched(device=32)}
    assert index.matched(prefixes(index, range(1, 64))) == {}
    assert index.matched(prefixes(index, range(15))) == {}


def test_children_are_found_behind_their_parents() -> None:
    index = made()
    index.learn("a", stored(range(32)))
    index.learn("a", stored(range(80), first=2))

    assert index.matched(prefixes(index, range(80))) == {"a": Matched(device=80)}


def test_a_child_whose_parent_was_never_told_is_counted_and_not_found() -> None:
    index = made()
    index.learn("a", stored(range(80), first=2))

    assert index.matched(prefixes(index, range(80))) == {}
    assert index.num_orphans == 3


def test_copies_in_lower_tiers_come_without_tokens_and_count_where_nothing_is_warmer() -> None:
    index = made()
    index.learn("a", stored(range(64)))
    index.learn("a", BlockStored(names(range(64))[:3], None, [], SIZE, "CPU"))
    index.learn("a", BlockStored(names(range(64)), None, [], SIZE, "STORAGE"))

    index.learn("a", BlockRemoved(names(range(64))[1:], "GPU"))

    assert index.matched(prefixes(index, range(64))) == {"a": Matched(device=16, host=32, disk=16)}


def test_what_one_replica_called_its_blocks_is_known_of_another_that_is_started_on_its_disk() -> None:
    index = made()
    index.learn("a", stored(range(64)))
    index.forget("a")

    index.learn("b", BlockStored(names(range(64)), None, [], SIZE, "STORAGE"))

    assert index.matched(prefixes(index, range(64))) == {"b": Matched(disk=64)}


def test_adapters_and_salts_share_nothing() -> None:
    index = made()
    index.learn("a", stored(range(32)))
    index.learn("b", stored(range(32), lora_name="legal", extra_keys=[["legal"], ["legal"]]))
    index.learn("c", stored(range(32), lora_name="legal", extra_keys=[["legal", "salt"], ["legal"]]))

    assert index.matched(prefixes(index, range(32))) == {"a": Matched(device=32)}
    assert index.matched(prefixes(index, range(32), "legal")) == {"b": Matched(device=32)}
    assert index.matched(prefixes(index, range(32), "legal", "salt")) == {"c": Matched(device=32)}
    assert index.matched(prefixes(index, range(32), None, "salt")) == {}
    assert set(index.loras) == {"legal"}


def test_a_prompt_without_images_does_not_match_one_with_images_behind_them() -> None:
    index = made()
    index.learn("a", stored(range(64), extra_keys=[None, [["image", 3]], [["image", -13]], None]))

    assert index.matched(prefixes(index, range(64))) == {"a": Matched(device=16)}


def test_of_several_groups_of_layers_the_first_decides() -> None:
    index = made()
    index.learn("a", stored(range(32), group_idx=0))
    index.learn("b", stored(range(32), group_idx=1))
    index.learn("a", BlockRemoved(names(range(32)), "GPU", group_idx=1))

    assert index.matched(prefixes(index, range(32))) == {"a": Matched(device=32)}


def test_a_prompt_that_was_sent_is_expected_until_it_is_told_of() -> None:
    index = made()
    sent = prefixes(index, range(64))

    index.expect("a", sent)
    assert index.matched(sent) == {"a": Matched(expected=64)}

    index.learn("a", stored(range(32)))
    assert index.matched(sent) == {"a": Matched(device=32, expected=32)}

    index.learn("a", BlockRemoved(names(range(32)), "GPU"))
    assert index.matched(sent) == {}, "it was told of, and has gone"


def test_what_a_replica_will_not_compute_is_expected_no_longer_and_what_it_has_is_still_had() -> None:
    index = made()
    index.learn("a", stored(range(32)))
    sent = prefixes(index, range(64))
    for replica in "ab":
        index.expect(replica, sent)

    index.expect_no_longer("a", sent)

    assert index.matched(sent) == {"a": Matched(device=32), "b": Matched(expected=64)}


def test_what_is_expected_does_not_hide_what_is_told() -> None:
    index = made()
    index.learn("a", stored(range(64)))

    index.expect("a", prefixes(index, range(64)))
    index.learn("a", BlockRemoved(names(range(64)), "GPU"))

    assert index.matched(prefixes(index, range(64))) == {}


def _replace(index: PrefixIndex) -> None:
    """The replica goes, and another comes with its name."""
    index.remove("a")
    index.add("a")


@pytest.mark.parametrize(
    "clear",
    [
        lambda index: index.learn("a", AllBlocksCleared()),
        lambda index: index.forget("a"),
        lambda index: index.remove("a"),
        _replace,
    ],
)
def test_nothing_is_left_of_a_replica_that_is_forgotten(clear: object) -> None:
    index = made()
    for replica in "ab":
        index.learn(replica, stored(range(64)))
        index.expect(replica, prefixes(index, range(100, 200)))

    clear(index)

    assert index.matched(prefixes(index, range(64))) == {"b": Matched(device=64)}
    assert index.matched(prefixes(index, range(100, 200))) == {"b": Matched(expected=96)}


def test_what_a_replica_had_is_swept_away_as_events_come_however_often_it_is_forgotten() -> None:
    index = made()
    for number in range(3 * SWEPT // 10):
        index.learn("a", stored(range(1000 * number, 1000 * number + 160)))
    assert index.num_prefixes == 3 * SWEPT

    for _ in range(5):
        index.forget("a")
        index.learn("a", stored(range(160)))
        index.learn("b", stored(range(160)))
    for _ in range(3):
        index.learn("b", stored(range(160)))

    assert index.num_prefixes == 10
    assert index.matched(prefixes(index, range(160))) == {"a": Matched(device=160), "b": Matched(device=160)}


def test_names_are_bounded_and_what_is_forgotten_is_believed_of_nobody() -> None:
    index = made(max_blocks=100)
    for number in range(50):
        index.learn("a", stored(range(1000 * number, 1000 * number + 160)))

    assert index.num_prefixes == 100
    assert index.matched(prefixes(index, range(160))) == {}
    newest = range(49_000, 49_160)
    assert index.matched(prefixes(index, newest)) == {"a": Matched(device=160)}


def test_what_is_expected_is_bounded() -> None:
    index = made(max_blocks=100)
    for number in range(50):
        index.expect("a", prefixes(index, range(1000 * number, 1000 * number + 160)))

    assert index.num_prefixes == 100
    assert index.matched(prefixes(index, range(160))) == {}


@pytest.mark.parametrize("num_blocks", [MAX_LOOKED_UP - 1, MAX_LOOKED_UP, MAX_LOOKED_UP + 1, 5 * MAX_LOOKED_UP + 3])
def test_the_end_of_a_long_match_is_exact(num_blocks: int) -> None:
    index = made()
    tokens = list(range(num_blocks * SIZE))
    index.learn("a", stored(tokens))

    for length in (1, 2, 7, num_blocks // 2, num_blocks - 1, num_blocks):
        prompt = prefixes(index, [*tokens[: length * SIZE], *[9] * (num_blocks - length) * SIZE])
        assert index.matched(prompt) == {"a": Matched(device=length * SIZE)}


def test_blocks_of_other_sizes_are_found_at_their_own_ends() -> None:
    """LMCache tells of its chunks, which are longer than vLLM's blocks."""
    index = made()
    index.learn("a", BlockStored([1], None, list(range(64)), 64, "cpu"))
    index.learn("a", BlockStored([2], 1, list(range(64, 128)), 64, "cpu"))

    assert index.block_sizes == [64]
    assert index.matched(prefixes(index, range(200), size=64)) == {"a": Matched(host=128)}


def test_sizes_that_come_once_do_not_push_out_those_that_come_often() -> None:
    """LMCache's last chunk of a prompt is as long as what is left of it."""
    index = made()
    for size in range(1, 60):
        index.learn("a", BlockStored([1000 + size], None, [*range(size)], size, "cpu"))
    for number in range(100, 110):
        index.learn("a", stored(range(number, number + 64)))
        index.learn("a", BlockStored([number], None, [*range(number, number + 256)], 256, "cpu"))

    assert index.block_sizes[:2] == [16, 256]
    assert len(index.block_sizes) == 3


def test_kvtiers_own_events_are_what_the_router_looks_for() -> None:
    """Through the bytes that a server sends, for each kind of key that can be known from a request."""
    index = made()
    for lora, salt in [(None, None), (None, "salt"), ("ad", None), ("ad", "salt")]:
        extra = ExtraKeys(lora=None if lora is None else Lora(lora, "/path"), cache_salt=salt)
        chain = BlockChain(SIZE, extra)
        chain.extend(range(64))
        events = [
            own.BlockStored(Tier.DEVICE, 0, chain.names[:2], SIZE, None, range(32), 0, extra),
            own.BlockStored(Tier.DEVICE, 0, chain.names[2:], SIZE, chain.names[1], range(32, 64), 32, extra),
            own.BlockStored(Tier.HOST, 0, chain.names, SIZE),
            own.BlockRemoved(Tier.DEVICE, 0, chain.names[3:]),
        ]
        payload = EventEncoder([FullAttention(SIZE)]).encode(1.0, events)

        for event in kv_event.decode(payload).events:
            index.learn("a", event)

        assert index.matched(prefixes(index, range(64), lora, salt)) == {"a": Matched(device=48, host=16)}


def test_kvtiers_events_of_a_prompt_with_an_image_match_up_to_it() -> None:
    index = made()
    extra = ExtraKeys(multimodal=(MultimodalItem("image", 20, 10),), cache_salt="salt")
    chain = BlockChain(SIZE, extra)
    chain.extend(range(64))
    stored_ = own.BlockStored(Tier.DEVICE, 0, chain.names, SIZE, None, range(64), 0, extra)

    for event in kv_event.decode(EventEncoder([FullAttention(SIZE)]).encode(1.0, [stored_])).events:
        index.learn("a", event)

    assert index.matched(prefixes(index, range(64), None, "salt")) == {"a": Matched(device=16)}


class PlainModel:
    """The same in ten lines: for each replica and medium the set of prefixes, as tuples of tokens."""

    def __init__(self) -> None:
        self.had = defaultdict(set)

    def matched(self, replica: str, tokens: Sequence[int]) -> Matched:
        counts = dict.fromkeys(PLACES, 0)
        for end in range(SIZE, len(tokens) + 1, SIZE):
            places = [place for place in PLACES if tuple(tokens[:end]) in self.had[replica, place]]
            if not places:
                break
            counts[places[0]] += SIZE
        return Matched(**counts)


@pytest.mark.parametrize("seed", range(4))
def test_random_events_leave_what_a_plain_model_has(seed: int) -> None:
    print(f"{seed=}")
    draw = random.Random(seed)
    index, model = made(), PlainModel()
    prompts = [_prompt(draw) for _ in range(12)]
    for _ in range(400):
        replica, tokens, (medium, place) = draw.choice("abc"), draw.choice(prompts), draw.choice(TIERS)
        ends = range(SIZE, len(tokens) + 1, SIZE)
        some = [i for i in range(len(ends)) if draw.random() < 0.7]
        match draw.choice(["store", "store", "copy", "remove", "remove", "clear", "replace"]):
            case "store":
                index.learn(replica, stored(tokens, medium))
                model.had[replica, place].update(tuple(tokens[:end]) for end in ends)
            case "copy" if any(model.had[each, "device"] >= {tuple(tokens[:end]) for end in ends} for each in "abc"):
                index.learn(replica, BlockStored([names(tokens)[i] for i in some], None, [], SIZE, medium))
                model.had[replica, place].update(tuple(tokens[: ends[i]]) for i in some)
            case "remove":
                index.learn(replica, BlockRemoved([names(tokens)[i] for i in some], medium))
                model.had[replica, place].difference_update(tuple(tokens[: ends[i]]) for i in some)
            case "clear" if draw.random() < 0.1:
                index.learn(replica, AllBlocksCleared())
                for each in PLACES:
                    model.had[replica, each].clear()
            case "replace" if draw.random() < 0.1:
                index.remove(replica)
                index.add(replica)
                for each in PLACES:
                    model.had[replica, each].clear()

        asked = draw.choice(prompts)
        expected = {each: found for each in "abc" if (found := model.matched(each, asked)).total}
        assert index.matched(prefixes(index, asked)) == expected


def _prompt(draw: random.Random) -> list[int]:
    """Made of few pieces, so that many prompts begin alike."""
    pieces = partial(draw.randrange, 3)
    return [token for _ in range(draw.randrange(1, 8)) for token in [pieces()] * SIZE]
