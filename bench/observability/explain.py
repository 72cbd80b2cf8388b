"""Does `kvtier explain` name why a prompt was not found, for 200 requests whose causes are planted?

Each kind of cause is made to happen to real engines over a small model: blocks are evicted from each tier by other
prompts or by a quota, cleared by a reset or an operator, damaged in host memory, on a disk that fails, hangs or is
slow; prompts are sent with another salt, adapter, template or seed, or only asked about. The cause is named if the
first tokens that were not found have the planted reason, the planted cause of their eviction, and the planted field
that differs, and if the tokens before them are those that were found.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest
from damaged_blocks import damage_in_host
from lora_adapters import ADAPTERS, save_adapter
from serving import MODEL, TEMPLATE, chat_tokenizer, serving
from small_models import build, byte_tokenizer

from bench.report import Effort
from bench.report import Row as Figure
from kvtier import LLM, SamplingParams
from kvtier.engine.observability.explain.explanation import Explanation, Why
from kvtier.engine.scheduling.request import RequestOptions
from kvtier.engine.scheduling.timeline import Caller
from kvtier.engine.stores import disk_store
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.store.record import Fault
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.naming.block_hash import ExtraKeys
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier

MIN_REQUESTS = 200
MIN_KINDS = 12
BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of the small model
NUM_BLOCKS = 8  # of a prompt
PROMPT_TOKENS = NUM_BLOCKS * BLOCK_SIZE + 5
NUM_SLOTS = 24  # of the device: two prompts and what they generate
MANY_SLOTS = 120  # of host memory
PUSHING_BLOCKS = 20  # of a prompt that pushes others out
SMALL_DISK = 12 << 20
READ_TIMEOUT_S = 0.3
SLOW_READ_S = 0.3  # a read of a few blocks, which are computed in a tenth of that
QUOTA_BLOCKS = NUM_BLOCKS
SETTLE_S = 30.0
NUM_MEASURED = 3  # reads: the speed of the disk is not known before
MAX_COPIES = 10  # that are waited for, one after the other
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Planted:
    """What a request's explanation has to say of its first missed tokens."""

    kind: str
    request_id: str
    why: Reason | Why
    cause: EvictionCause | None = None
    differs: tuple[str, ...] = ()

    def is_named(self, explanation: Explanation) -> bool:
        """Whether it says so."""
        explanation.check()
        missed = next(row for row in explanation.rows if row.why is not None)
        return (missed.why, missed.cause, missed.differs) == (self.why, self.cause, self.differs)


class PlantedStore(ReopeningStore):
    """A real store on a disk that does as it is told."""

    does: Callable[[], None] = staticmethod(lambda: None)  # before each read

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        """As a store does, after what was planted."""
        PlantedStore.does()
        return super().read_many(keys, outs)


@contextmanager
def _reads_do(what: Callable[[], None]) -> Iterator[None]:
    PlantedStore.does = staticmethod(what)
    try:
        yield
    finally:
        PlantedStore.does = staticmethod(lambda: None)


@dataclass
class Bed:
    """An engine, and prompts that nobody else has."""

    llm: LLM
    name: str
    per_kind: int  # how many requests each cause is planted for
    rng: random.Random
    planted: list[Planted] = field(default_factory=list)
    num_asked: int = 0
    misnamed: list[Planted] = field(default_factory=list)  # of the prompts that were asked about

    def prompt(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        """A new one."""
        return [self.rng.randrange(256) for _ in range(num_tokens)]

    def ask(self, prompt: Sequence[int], salt: str | None = None, lora: str | None = None, **options: bool) -> str:
        """Have it answered; the request's id."""
        core, request_id = self.llm.core, f"{self.name}-{self.num_asked}"
        self.num_asked += 1
        extra = ExtraKeys(lora=None if lora is None else core.lora_key(lora), cache_salt=salt)
        core.add(prompt, ONE_TOKEN, extra, time.monotonic(), RequestOptions(**options), Caller(request_id))
        while core.has_work:
            core.step()
        return request_id

    def settle(self) -> None:
        """Let what is to be copied down be copied, and a disk that rests come back. Blocks of a tenant over its quota
        are copied down again and again, so there is an end to it."""
        core, until = self.llm.core, time.monotonic() + SETTLE_S
        core.idle()
        for _ in range(MAX_COPIES):
            if not core.cache.num_in_flight:
                break
            core.cache.wait(0.01)
            core.idle()
        while not core.cache.lower.status.is_readable:
            core.cache.wait(0.01)
            core.idle()
            assert time.monotonic() < until, "the disk does not come back"

    def push_out(self, num_blocks: int) -> None:
        """Ask for so many blocks of others."""
        for _ in range(-(-num_blocks // PUSHING_BLOCKS)):
            self.ask(self.prompt(PUSHING_BLOCKS * BLOCK_SIZE + 1))
            self.settle()

    def plant(self, kind: str, request_id: str, why: Reason | Why, *more: object) -> None:
        """Note what is to be said of the request."""
        self.planted.append(Planted(kind, request_id, why, *more))  # type: ignore[arg-type]

    def plant_prompt(self, kind: str, prompt: Sequence[int], why: Reason | Why) -> None:
        """The same for a prompt that is asked about, and not asked."""
        planted = Planted(kind, "none", why)
        self.planted.append(planted)
        if not planted.is_named(self.llm.core.explain_prompt(self.llm.core.chain(prompt, ExtraKeys())).explanation()):
            self.misnamed.append(planted)

    def not_named(self) -> list[Planted]:
        """Those of which something else is said, or nothing."""
        explainer = self.llm.core.explainer
        found = [(each, explainer.find(each.request_id, None)) for each in self.planted if each.request_id != "none"]
        return self.misnamed + [
            each
            for each, pasts in found
            if len(pasts) != 1 or not each.is_named(explainer.evidence(pasts[0]).explanation())
        ]


def explain_rows(effort: Effort, folder: Path) -> list[Figure]:
    """Requests by kind, and how many of them are explained otherwise than was planted."""
    beds, per_kind = list[Bed](), effort.of(14, quick=1)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(disk_store, "ReopeningStore", PlantedStore)
        beds_of = (_memory, _device, _host, _small_disk, _bad_disk, _slow_disk, _seeds)
        missed = [each for plant in beds_of for each in plant(folder, beds, per_kind)]
    planted = [each for bed in beds for each in bed.planted]
    template, wrong_template = _templates(per_kind)
    kinds = {each.kind: sum(other.kind == each.kind for other in planted) for each in planted} | {"template": template}
    num_requests, num_wrong = sum(kinds.values()), len(missed) + wrong_template
    for each in missed:
        print(f"not named: {each}", file=sys.stderr)
    rows = [Figure(f"requests: {kind}", number, "") for kind, number in sorted(kinds.items())]
    return [
        *rows,
        Figure("kinds of causes", len(kinds), "", f">= {MIN_KINDS}", len(kinds) >= MIN_KINDS),
        Figure("requests", num_requests, "", f">= {MIN_REQUESTS}", num_requests >= MIN_REQUESTS, varies=True),
        Figure("requests whose planted cause is not named", num_wrong, "", "0", num_wrong == 0),
    ]


@contextmanager
def _bed(name: str, beds: list[Bed], per_kind: int, **tables: object) -> Iterator[Bed]:
    config = {
        "device": {"capacity": NUM_SLOTS * BLOCK_BYTES, "block_size": BLOCK_SIZE, "partial_blocks": False},
        "host": {"capacity": MANY_SLOTS * BLOCK_BYTES},
        "scheduler": {"load": "always"},
        **tables,
    }
    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        beds.append(Bed(llm, name, per_kind, random.Random(name)))
        yield beds[-1]


def _memory(folder: Path, beds: list[Bed], per_kind: int) -> list[Planted]:
    """What can happen with a device and host memory, in any order."""
    adapter = save_adapter(build("llama"), folder / "adapter", **ADAPTERS["all"])
    quota = {"bounded": {"host": QUOTA_BLOCKS * BLOCK_BYTES}}
    with _bed("memory", beds, per_kind, lora={"legal": {"path": str(adapter)}}, tenants=quota) as bed:
        kinds: Mapping[str, Callable[[], None]] = {
            "never seen": partial(_never_seen, bed),
            "quota": partial(_quota, bed),
            "cleared by a reset": partial(_reset, bed),
            "cleared by an operator": partial(_purged, bed),
            "other salt": partial(_other_salt, bed),
            "other adapter": partial(_other_adapter, bed),
            "shorter than a block": partial(_short, bed),
            "corrupt": partial(_corrupt, bed),
            "skipped": partial(_skipped, bed),
            "last block": partial(_last_block, bed),
        }
        order = [kind for kind in kinds for _ in range(per_kind)]
        bed.rng.shuffle(order)
        for kind in order:
            kinds[kind]()
        return bed.not_named()


def _never_seen(bed: Bed) -> None:
    bed.plant("never seen", bed.ask(bed.prompt()), Reason.NEVER_SEEN)


def _known(bed: Bed, num_prompts: int) -> list[list[int]]:
    """So many prompts that have been asked."""
    prompts = [bed.prompt() for _ in range(num_prompts)]
    for prompt in prompts:
        bed.ask(prompt)
        bed.settle()
    return prompts


def _evicted(bed: Bed, tier: Tier, num_blocks: int) -> None:
    prompts = _known(bed, bed.per_kind)
    bed.push_out(num_blocks)
    for prompt in prompts:
        bed.plant(f"evicted from {tier}", bed.ask(prompt), Reason.evicted_from(tier), EvictionCause.ROOM)


def _quota(bed: Bed) -> None:
    """A tenant whose quota of host memory has room for one prompt, and a second one comes there."""
    salt, prompt = f"bounded\0{bed.num_asked}", bed.prompt()
    for each in (prompt, bed.prompt()):
        bed.ask(each, salt)
        bed.settle()
        bed.push_out(2 * NUM_SLOTS)
    bed.plant("quota", bed.ask(prompt, salt), Reason.EVICTED_FROM_HOST, EvictionCause.QUOTA)


def _reset(bed: Bed) -> None:
    prompt = bed.prompt()
    bed.ask(prompt)
    bed.settle()
    bed.push_out(2 * NUM_SLOTS)
    assert bed.llm.reset_prefix_cache(), "something is leased"
    bed.plant("cleared by a reset", bed.ask(prompt), Reason.EVICTED_FROM_HOST, EvictionCause.CLEARED)


def _purged(bed: Bed) -> None:
    """An operator has the blocks of one tenant leave."""
    salt, prompt = f"tenant {bed.num_asked}", bed.prompt()
    bed.ask(prompt, salt)
    bed.settle()
    bed.push_out(2 * NUM_SLOTS)
    purge = bed.llm.core.cache.purge(PurgeOrder(tenant=tenant_of(salt)))
    while not purge.go_on():
        bed.llm.core.idle()
    bed.plant("cleared by an operator", bed.ask(prompt, salt), Reason.EVICTED_FROM_HOST, EvictionCause.CLEARED)


def _other_salt(bed: Bed) -> None:
    prompt = bed.prompt()
    bed.ask(prompt)
    bed.plant("other salt", bed.ask(prompt, f"salt {bed.num_asked}"), Why.OTHER, None, ("cache_salt",))


def _other_adapter(bed: Bed) -> None:
    prompt = bed.prompt()
    bed.ask(prompt)
    bed.plant("other adapter", bed.ask(prompt, lora="legal"), Why.OTHER, None, ("adapter",))


def _short(bed: Bed) -> None:
    bed.plant("shorter than a block", bed.ask(bed.prompt(bed.rng.randrange(1, BLOCK_SIZE))), Why.SHORT)


def _corrupt(bed: Bed) -> None:
    prompt = bed.prompt()
    bed.ask(prompt)
    bed.settle()
    bed.push_out(2 * NUM_SLOTS)
    damage_in_host(bed.llm.core, bed.llm.core.chain(prompt, ExtraKeys()).names[bed.rng.randrange(NUM_BLOCKS)])
    bed.plant("corrupt", bed.ask(prompt), Reason.CORRUPT)


def _skipped(bed: Bed) -> None:
    prompt = bed.prompt()
    bed.ask(prompt)
    bed.plant("skipped", bed.ask(prompt, reads_cache=False), Reason.SKIPPED)


def _last_block(bed: Bed) -> None:
    prompt = bed.prompt()
    bed.ask(prompt)
    bed.plant("last block", bed.ask(prompt), Reason.LAST_BLOCK)


def _device(folder: Path, beds: list[Bed], per_kind: int) -> list[Planted]:
    with _bed("device", beds, per_kind, host={"capacity": 0}) as bed:
        _evicted(bed, Tier.DEVICE, 2 * NUM_SLOTS)
        return bed.not_named()


def _host(folder: Path, beds: list[Bed], per_kind: int) -> list[Planted]:
    with _bed("host", beds, per_kind) as bed:
        _evicted(bed, Tier.HOST, 2 * (NUM_SLOTS + MANY_SLOTS))
        return bed.not_named()


def _small_disk(folder: Path, beds: list[Bed], per_kind: int) -> list[Planted]:
    disk = {"path": str(folder / "small"), "capacity": SMALL_DISK}
    with _bed("small disk", beds, per_kind, host={"capacity": 2 * NUM_SLOTS * BLOCK_BYTES}, disk=disk) as bed:
        _evicted(bed, Tier.DISK, 5 * NUM_SLOTS + SMALL_DISK // BLOCK_BYTES)
        return bed.not_named()


def _on_disk_only(bed: Bed, num_prompts: int) -> list[list[int]]:
    """Prompts whose blocks are on disk, and in no memory."""
    prompts = _known(bed, num_prompts)
    bed.push_out(5 * NUM_SLOTS)
    core = bed.llm.core
    for prompt in prompts:
        assert set(core.cache.lookups.where(core.chain(prompt, ExtraKeys()))) == {Tier.DISK}, "not on disk only"
    return prompts


def _bad_disk(folder: Path, beds: list[Bed], per_kind: int) -> list[Planted]:
    """A disk that fails, and one that hangs beyond a read's time."""
    disk = {"path": str(folder / "bad"), "capacity": "256MiB", "read_timeout_s": READ_TIMEOUT_S}
    with _bed("bad disk", beds, per_kind, host={"capacity": 2 * NUM_SLOTS * BLOCK_BYTES}, disk=disk) as bed:
        for prompt in _on_disk_only(bed, per_kind):
            with _reads_do(_fail):
                bed.plant("failed", bed.ask(prompt), Reason.FAILED)
            bed.settle()
        for prompt in _on_disk_only(bed, per_kind):
            gate = threading.Event()
            with _reads_do(partial(_wait_for, gate)):
                bed.plant("deadline", bed.ask(prompt), Reason.DEADLINE)
            gate.set()
            bed.settle()
        return bed.not_named()


def _fail() -> None:
    raise OSError("planted")


def _wait_for(gate: threading.Event) -> None:
    gate.wait()


def _slow_disk(folder: Path, beds: list[Bed], per_kind: int) -> list[Planted]:
    """A disk that is slower than computing."""
    disk = {"path": str(folder / "slow"), "capacity": "256MiB"}
    tables = {"host": {"capacity": 2 * NUM_SLOTS * BLOCK_BYTES}, "disk": disk, "scheduler": {"load": "cost"}}
    with _bed("slow disk", beds, per_kind, **tables) as bed, _reads_do(partial(time.sleep, SLOW_READ_S)):
        prompts = _on_disk_only(bed, NUM_MEASURED + per_kind)
        for prompt in prompts[:NUM_MEASURED]:
            bed.ask(prompt)
        for prompt in prompts[NUM_MEASURED:]:
            bed.plant_prompt("cost, of a prompt that is only asked about", prompt, Reason.COST)
            bed.plant("cost", bed.ask(prompt), Reason.COST)
        return bed.not_named()


def _seeds(folder: Path, beds: list[Bed], per_kind: int) -> list[Planted]:
    """A store that was written under another seed of names."""
    disk = {"path": str(folder / "seeds"), "capacity": "64MiB"}
    with _bed("seed a", beds, per_kind, disk=disk, names={"seed": "a"}) as bed:
        prompts = [bed.prompt() for _ in range(per_kind)]
        for prompt in prompts:
            bed.ask(prompt)
    with _bed("seed b", beds, per_kind, disk=disk, names={"seed": "b"}) as bed:
        for prompt in prompts:
            bed.plant("other namespace", bed.ask(prompt), Why.OTHER, None, ("namespace: hash_seed",))
        return bed.not_named()


def _templates(per_kind: int) -> tuple[int, int]:
    """Chats whose template makes other text of the same messages, over HTTP: how many, and of how many that is not
    said."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% if today is defined %}[{{ today }}]{% endif %}" + TEMPLATE
    tables = {"device": {"capacity": "8MiB", "block_size": BLOCK_SIZE}}
    num_wrong = 0
    with serving(build("llama"), tables, tokenizer=tokenizer) as server:
        for number in range(per_kind):
            messages = [{"role": "user", "content": f"{number}: where did all of these tokens come from, please?"}]
            for request_id, kwargs in ((f"usual-{number}", {}), (f"dated-{number}", {"today": "a Monday in May"})):
                body = {"model": MODEL, "messages": messages, "max_tokens": 1, "chat_template_kwargs": kwargs}
                server.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id}).raise_for_status()
            rows = _told(server.url, f"dated-{number}")
            missed = next(row for row in rows if row["missed"])
            num_wrong += (missed["missed"], missed["differs"]) != ("other_template", ["template"])
    return per_kind, num_wrong


def _told(url: str, request_id: str) -> list[dict[str, object]]:
    """The rows of a request's explanation, once it has ended."""
    until = time.monotonic() + SETTLE_S
    while (answer := httpx.get(f"{url}/v1/kvtier/explain/{request_id}")).status_code == 404:
        assert time.monotonic() < until, "it never ended"
        time.sleep(0.01)
    rows: list[dict[str, object]] = answer.raise_for_status().json()["data"][0]["rows"]
    return rows
