"""What engines are told: it is what the books say, whatever happens, and whenever they attach."""

import random
from pathlib import Path

import pytest
from engine_bed import GROUPS, Bed, Engine, engine_bed, in_books, names

from kvtier.engine.attached import wire
from kvtier.sidecar import port as port_module
from kvtier.sidecar.own import feed as feed_module
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower import disk_index


def is_told(engine: Engine) -> bool:
    """Whether it has been told of all that there was; takes in what it was told."""
    engine.hear()
    return any(isinstance(message, wire.Told) for message in engine.told)


def assert_knows(bed: Bed, engine: Engine) -> None:
    """The engine has been told what is so."""
    engine.hear()
    assert (engine.host, engine.disk) == in_books(bed.tiers())
    index = bed.tiers().tiers.index.disk.index
    assert index.num_blocks == sum(map(len, engine.disk))
    assert all(index.are_held(group, list(known)).all() for group, known in enumerate(engine.disk))


def step(rng: random.Random, engine: Engine) -> None:
    """Something that an engine may do now."""
    document, group, num_blocks = rng.randrange(12), rng.randrange(len(GROUPS)), rng.randrange(1, 16)
    blocks = names(document, num_blocks)
    match rng.choice(["store", "store", "store", "load", "load", "forget", "refresh", "abandon"]):
        case "store":
            slots = engine.reserve(num_blocks, group)
            if slots:
                engine.publish(blocks[: len(slots)], slots, group)
        case "load":
            number = engine.fetch(blocks, group, is_for_later=rng.random() < 0.3)
            engine.bed.turn(rng.randrange(5))
            engine.say(wire.Release(number, wire.packed(range(num_blocks - 1, -1, -1))))
        case "forget":
            engine.say(wire.Forget(group, wire.joined(blocks[:2])))
        case "refresh":
            engine.say(wire.Refresh(group, wire.joined(blocks), bytes(num_blocks)))
        case "abandon":
            engine.say(wire.Abandon(group, wire.packed(engine.reserve(num_blocks, group))))


@pytest.mark.parametrize("seed", range(6))
def test_engines_know_what_is_so_after_anything(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PAGE_BLOCKS", 3)
    monkeypatch.setattr(feed_module, "MAX_SLOTS_PER_PAGE", 10)
    monkeypatch.setattr(disk_index, "TOLD_AT_ONCE", 1)
    rng = random.Random(seed)
    store = MemoryStore(60 * 4200) if seed % 3 else None
    with engine_bed(tmp_path, num_extents=3, store=store) as bed:
        bed.turn_s = 0.003
        engines = [Engine(bed) for _ in range(3)]
        for number in range(300):
            place = rng.randrange(3)
            step(rng, engines[place])
            for lane in bed.lanes.values():
                lane.num_rests = rng.choice([0, 0, 0, 5, 20])
            bed.turn(rng.randrange(4))
            if rng.random() < 0.05:
                engines[place].close()
                engines[place] = Engine(bed)
            if rng.random() < 0.02:
                engines[place].ask(wire.Clear(), wire.Cleared)
            bed.check()
            if number % 50 == 49:
                bed.settle()
                for engine in engines:
                    assert_knows(bed, engine)
        for engine in engines:
            engine.close()
        bed.settle()
        assert bed.num_leases() == 0


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_attaches_while_all_changes_knows_what_is_so(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "PAGE_BLOCKS", 2)
    monkeypatch.setattr(disk_index, "TOLD_AT_ONCE", 1)
    rng = random.Random(seed)
    with engine_bed(tmp_path, num_extents=3, store=MemoryStore(400 * 4200)) as bed:
        engine = Engine(bed)
        for document in range(12):
            engine.store(document, 15, document % 2)
        late = Engine(bed)
        num_steps = 0
        while not is_told(late):
            step(rng, engine)
            num_steps += 1

        assert num_steps > 20, "it was told of all at once"
        bed.settle()
        assert_knows(bed, late)
        engine.close()
        late.close()


def test_an_engine_that_does_not_read_is_told_no_more_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PAGE_BLOCKS", 1)
    monkeypatch.setattr(feed_module, "MAX_UNREAD_BYTES", 200)
    with engine_bed(tmp_path) as bed:
        engine = Engine(bed, groups=[wire.GroupShape(1, False, 16)])
        num_blocks = 600  # more than the kernel keeps for one that does not read
        for start in range(0, num_blocks, 100):
            engine.publish(names(start, 100), engine.reserve(100))
        late = Engine(bed, groups=[wire.GroupShape(1, False, 16)])
        bed.turn(3 * num_blocks)

        (unread,) = [client.unread for client in bed.port.clients if client.unread]
        assert 200 <= len(unread) < 400
        assert not bed.port.has_more
        assert engine.ask(wire.Ping(), wire.Pong)  # others are served meanwhile
        assert not is_told(late)
        late.next(wire.Told)
        assert late.host == engine.host
        assert len(late.host[0]) == num_blocks
        engine.close()
        late.close()


def test_an_engine_that_never_reads_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "MAX_QUEUED_BYTES", 100_000)
    with engine_bed(tmp_path) as bed:
        engine, deaf = Engine(bed), Engine(bed)
        deaf.reserve(3)
        turns = 0
        while len(bed.endpoint.clients()) == 2:
            engine.store(turns % 7, 50)
            engine.say(wire.Forget(0, wire.joined(names(turns % 7, 50))))
            turns += 1
            assert turns < 2000

        assert bed.endpoint.counts().refused == {"unread": 1}
        assert bed.num_leases() == 3, "it may still write there"
        assert engine.store(9, 10) == 10
        engine.close()
        deaf.close()


def test_a_disk_that_is_emptied_by_another_start_is_told_of(tmp_path: Path) -> None:
    store = MemoryStore(400 * 4200)
    with engine_bed(tmp_path, num_extents=2, store=store, openings=(openings := [1])) as bed:
        engine = Engine(bed)
        for document in range(3):
            engine.store(document, 15)
        assert len(engine.disk[0]) == 45
        keys = list(store.keys())
        store.delete(keys[10:])

        openings[0] = 2
        bed.settle()
        engine.hear()

        host, disk = in_books(bed.tiers())
        assert engine.disk == disk
        assert engine.host == host
        engine.close()


def test_what_was_on_disk_before_the_start_is_told_as_it_is_found(tmp_path: Path) -> None:
    store = MemoryStore(400 * 4200)
    with engine_bed(tmp_path, num_extents=2, store=store) as bed:
        engine = Engine(bed)
        for document in range(3):
            engine.store(document, 15)
        engine.close()
    with engine_bed(tmp_path, num_extents=2, store=store) as bed:
        engine = Engine(bed)
        assert engine.next(wire.TiersState).is_indexed is False
        bed.settle()

        engine.hear()

        assert engine.disk == [{*names(0, 15), *names(1, 15), *names(2, 15)}, set()]
        assert [message.is_indexed for message in engine.told if isinstance(message, wire.TiersState)][-1] is True
        assert engine.load(1, 15) == (list(range(15)), {})
        engine.close()
