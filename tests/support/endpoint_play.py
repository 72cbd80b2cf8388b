"""Engines that come and go at LMCache's endpoint, over a segment too small for them, with rests and damage."""

import random
from dataclasses import dataclass, field

from lmcache_bed import CHUNK, FORMS, Bed, RawClient, key

DOCUMENTS = [[document, *range(1000, 1000 + CHUNK * num - 1)] for document, num in enumerate((3, 5, 8, 8, 12, 12))]


@dataclass
class Engine:
    """One worker with a scheduler, and the requests it has under way."""

    scheduler: RawClient
    worker: RawClient
    instance: int
    # By request: its tokens, the chunks between which it was promised all, and how much damage was found before.
    promised: dict[str, tuple[list[int], int, int, int]] = field(default_factory=dict)
    writing: dict[str, tuple[list[int], object]] = field(default_factory=dict)  # tokens, and where to


def attach(bed: Bed, instance: int, kind: type[RawClient]) -> Engine:
    form = FORMS[instance % len(FORMS)]
    engine = Engine(RawClient(bed, form), kind(bed, form), instance)
    engine.worker.register(instance_id=instance)
    return engine


def prompt(rng: random.Random) -> list[int]:
    document = rng.choice(DOCUMENTS)
    return document[: rng.randrange(CHUNK, len(document) + 1)] + [rng.randrange(9)] * rng.randrange(2 * CHUNK)


def step(bed: Bed, rng: random.Random, engine: Engine, request: str, looked_up: dict[str, int]) -> None:
    """Something that an engine may do now. *looked_up*: the tokens of each prompt, by request."""
    match rng.choice([0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 5, 5]):
        case 0 | 1:
            tokens = prompt(rng)
            looked_up[request] = len(tokens)
            start = rng.choice([0, 0, rng.randrange(len(tokens) // CHUNK + 1) * CHUNK])  # what the engine has itself
            num_damaged = bed.endpoint.statistics().promised.num_corrupt
            found = engine.scheduler.lookup(tokens, request, start=start)
            assert 0 <= found <= len(tokens) // CHUNK
            engine.promised[request] = tokens, start // CHUNK, found, num_damaged
        case 2 if engine.promised:
            request = rng.choice(list(engine.promised))
            tokens, start, num_chunks, num_damaged = engine.promised.pop(request)
            local = rng.randrange(min(start, num_chunks), num_chunks + 1)
            if local:
                engine.scheduler.ask("free", key(tokens, request, worker=None, end=local * CHUNK), 1)
            if num_chunks > local:
                is_loaded = engine.worker.retrieve(
                    tokens, request, engine.instance, start=local * CHUNK, end=num_chunks * CHUNK
                )
                is_damaged = bed.endpoint.statistics().promised.num_corrupt > num_damaged
                assert is_loaded or is_damaged, "a promise was not kept"
            engine.scheduler.ask("end_session", request)
        case 3 if engine.promised:
            request = rng.choice(list(engine.promised))
            engine.scheduler.ask("end_session", request)
            del engine.promised[request]
        case 4:
            tokens = prompt(rng)
            answer = engine.worker.ask("prepare_store", key(tokens, request), engine.instance)
            engine.writing[request] = tokens, answer["context"]
        case 5 if engine.writing:
            request = rng.choice(list(engine.writing))
            tokens, context = engine.writing.pop(request)
            engine.worker.write(context, key(tokens, request))
            if context["slots"]:
                assert engine.worker.ask("commit_store", key(tokens, request), engine.instance, b"") is True


def flip_somewhere(bed: Bed, rng: random.Random) -> None:
    """Damage a byte of a chunk that no engine was promised."""
    for tiers in bed.layouts:
        group = rng.randrange(len(tiers.memories))
        pool = tiers.tiers.index.host[group].pool
        slots = [slot for slot in tiers.tiers.index.host_blocks[group].slots().tolist() if pool.is_free(slot)]
        if slots:
            tiers.memories[group].host_block(rng.choice(slots))[rng.randrange(512)] ^= 1 << rng.randrange(8)


def play(
    bed: Bed, seed: int, num_steps: int, looked_up: dict[str, int], kind: type[RawClient] = RawClient
) -> list[Engine]:
    """Let so many things happen to three engines, whose workers are of the *kind*; those that are there at the end. See
    `step`."""
    rng = random.Random(seed)
    bed.turn_s = 0.003
    engines = [attach(bed, number, kind) for number in range(3)]
    for number in range(num_steps):
        place = rng.randrange(len(engines))
        step(bed, rng, engines[place], f"r{number}", looked_up)
        for lane in bed.lanes.values():
            lane.num_rests = rng.choice([0, 0, 0, 5, 20])
        if rng.random() < 0.05:
            flip_somewhere(bed, rng)
        if rng.random() < 0.02:
            engines[place].scheduler.close()
            engines[place].worker.close()
            engines[place] = attach(bed, 100 + number, kind)
        if rng.random() < 0.01:
            engines[place].worker.ask("clear", True)
        bed.check()
    return engines
