"""`kvtier prove` and real servers of kvtier: right from every tier, and wrong where their checks are taken out."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest
import torch
from engine_sidecar import started_sidecar
from foreign.running import free_port
from lora_adapters import save_adapters
from serving import BLOCK_BYTES, Address, ServerProcess, chat_tokenizer, come_true, serving, serving_process, tables
from small_models import build

from kvtier.cli.prove.dialect import ModelClient
from kvtier.cli.prove.endpoint import Endpoint
from kvtier.cli.prove.judgement import Verdict
from kvtier.cli.prove.proof import Proof, ProofConfig, prove
from kvtier.cli.prove.push_out import EvictionStep
from kvtier.engine.scheduling.request import RequestOptions
from kvtier.server.generation_request import GenerationRequest
from kvtier.tiers.naming.block_hash import ExtraKeys

pytestmark = pytest.mark.long

LENGTH = 200
NUM_SLOTS = 4000  # of 16 tokens: all that is asked
FEW_SLOTS = 100
UNVERIFIED = Path(__file__).parents[2] / "support" / "unverified"
CONFIG = """
[device]
capacity = {device}
block_size = 16

[host]
capacity = {host}

[disk]
path = "{path}"
capacity = "256MiB"
read_timeout_s = 60.0

[scheduler]
load = "always"
"""


@dataclass(frozen=True, slots=True)
class InBetween(EvictionStep):
    """Does a deed in place of a command."""

    deed: Callable[[], None] = lambda: None

    def run_command(self, askers: Sequence[ModelClient]) -> None:
        self.deed()


def proof_of(
    server: Address, other: Address | None = None, push_out: EvictionStep | None = None, seed: int = 1
) -> Proof:
    order = ProofConfig(
        endpoint=Endpoint(server.url, None),
        other=None if other is None else Endpoint(other.url, None),
        model=None,
        adapters=None,
        lengths=(LENGTH,),
        num_rounds=2,
        concurrency=4,
        push_out=push_out,
        seed=seed,
    )
    return prove(order, lambda *_: None)


def families(proof: Proof) -> set[str]:
    """Those in which something was found."""
    return {finding.question.family if finding.question else "" for finding in proof.judgement.findings}


def hits(server: Address, tier: str) -> float:
    """How many tokens of prompts came from that tier."""
    return metric(server, "kvtier_hit_tokens_total", f'tier="{tier}"')


def metric(server: Address, name: str, label: str = "") -> float:
    """The sum of that metric's values, of those with that label."""
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts verify no bytes."""
    monkeypatch.setenv("PYTHONPATH", str(UNVERIFIED))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    build("llama").save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def serving_tiers(folder: Path, model: Path, port: int = 0, host_slots: int = NUM_SLOTS) -> Iterator[ServerProcess]:
    """A server with few slots on the device, some in host memory, and a disk."""
    sizes = {"device": FEW_SLOTS * BLOCK_BYTES, "host": host_slots * BLOCK_BYTES}
    config = CONFIG.format(path=folder / "store", **sizes)
    with serving_process(folder, model, config, "--port", port) as server:
        yield server


class Restarted(Address):
    """A server that can be ended and started again, on one store and at one port."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(free_port())
        self._folder, self._model = folder, model
        self._running = ExitStack()

    def __enter__(self) -> Self:
        self._server = self._running.enter_context(serving_tiers(self._folder, self._model, self.port))
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def restart(self, deed: Callable[[], None] = lambda: None) -> None:
        """End it as systemd does, so that what is cached is on disk; *deed* comes before it starts again."""
        self._server.signal()
        assert self._server.wait() == 0
        self._running.close()
        deed()
        self.__enter__()


def flip(path: Path) -> None:
    """Flip the highest bit of an exponent in each block that has been written to."""
    with path.open("r+b") as file:
        for offset in range(0, os.fstat(file.fileno()).st_size, BLOCK_BYTES):
            file.seek(offset)
            block = file.read(BLOCK_BYTES)
            if any(block):
                file.seek(offset + 2051)
                file.write(bytes([block[2051] ^ 64]))


def flip_host(server: ServerProcess) -> None:
    slabs: dict[int, Path] = {}  # by inode: it may be open more than once
    for file in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # connections come and go
            if "kvtier-host-slab" in os.readlink(file):
                slabs[file.stat().st_ino] = file
    assert len(slabs) == 1
    for slab in slabs.values():
        flip(slab)


def test_what_a_server_answers_from_its_device_is_right() -> None:
    with serving(build("llama"), tables(NUM_SLOTS)) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.PROVEN
    assert {row.verdict for row in proof.judgement.rows} == {Verdict.PROVEN}


@pytest.mark.slow
def test_what_it_answers_from_host_memory_is_right_also_where_bits_have_flipped(
    tmp_path: Path, model_folder: Path
) -> None:
    with serving_tiers(tmp_path, model_folder) as server:
        right = proof_of(server, push_out=EvictionStep(2 * 16 * FEW_SLOTS, None))
        from_host = hits(server, "host")
        flipped = InBetween(2 * 16 * FEW_SLOTS, None, lambda: flip_host(server))
        damaged = proof_of(server, push_out=flipped, seed=2)
        num_corrupt = metric(server, "kvtier_corrupt_blocks_total")

    assert right.judgement.verdict is Verdict.PROVEN
    assert from_host > 5 * LENGTH
    assert num_corrupt > 0
    assert damaged.judgement.findings == ()


@pytest.mark.slow
def test_bits_that_flip_in_host_memory_are_found_where_it_is_not_verified(
    tmp_path: Path, model_folder: Path, unverified: None
) -> None:
    with serving_tiers(tmp_path, model_folder) as server:
        right = proof_of(server, push_out=EvictionStep(2 * 16 * FEW_SLOTS, None))
        flipped = InBetween(2 * 16 * FEW_SLOTS, None, lambda: flip_host(server))
        damaged = proof_of(server, push_out=flipped, seed=2)

    assert right.judgement.verdict is Verdict.PROVEN
    assert damaged.judgement.verdict is Verdict.WRONG
    assert "same prompt" in families(damaged)


def test_what_it_answers_from_disk_after_a_restart_is_right(tmp_path: Path, model_folder: Path) -> None:
    with Restarted(tmp_path, model_folder) as restarted:
        proof = proof_of(restarted, push_out=InBetween(0, None, restarted.restart))
        from_disk = hits(restarted, "disk")

    assert proof.judgement.verdict is Verdict.PROVEN
    assert from_disk > 5 * LENGTH


def test_bits_that_flip_on_disk_are_found_where_it_is_not_verified(
    tmp_path: Path, model_folder: Path, unverified: None
) -> None:
    def flip_disk() -> None:
        for slab in (tmp_path / "store").glob("slab-*"):
            flip(slab)

    with Restarted(tmp_path, model_folder) as restarted:
        proof = proof_of(restarted, push_out=InBetween(0, None, lambda: restarted.restart(flip_disk)))

    assert proof.judgement.verdict is Verdict.WRONG
    assert "same prompt" in families(proof)


@pytest.mark.slow
def test_adapters_that_names_leave_out_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = {name: {"path": str(folder)} for name, folder in save_adapters("llama", tmp_path).items()}
    with serving(build("llama"), {**tables(NUM_SLOTS), "lora": lora}) as server:
        right = proof_of(server)
    with monkeypatch.context() as patch:
        keys = ExtraKeys.keys_of_block
        patch.setattr(ExtraKeys, "keys_of_block", lambda self, *place: keys(replace(self, lora=None), *place))
        with serving(build("llama"), {**tables(NUM_SLOTS), "lora": lora}) as server:
            mixed_up = proof_of(server)

    assert right.judgement.verdict is Verdict.PROVEN
    assert {"all after the model", "all, same prompt"} <= {row.family for row in right.judgement.rows}
    assert mixed_up.judgement.verdict is Verdict.WRONG
    after = {"all after the model", "ranked after all", "mlp after ranked", "the model after mlp"}
    assert after <= families(mixed_up) <= {*after, ""}  # a new prompt has found another's first token
    assert any("off by" in finding.what for finding in mixed_up.judgement.findings)


@pytest.mark.slow
def test_two_models_of_one_name_are_kept_apart_by_their_weights_and_found_where_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = str(tmp_path / "own.sock")
    with started_sidecar(tmp_path, socket), two_models(socket) as (one, other):
        right = proof_of(one, other)
    monkeypatch.setattr("kvtier.engine.model.runner.weights_digest", lambda model: "equal")
    with started_sidecar(tmp_path, socket), two_models(socket) as (one, other):
        mixed_up = proof_of(one, other)

    assert right.judgement.verdict is Verdict.PROVEN
    assert mixed_up.judgement.verdict is Verdict.WRONG
    assert families(mixed_up) == {"the other server after the model", "the model after the other server"}


def test_a_server_that_reads_no_cache_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationRequest, "options", property(lambda _: RequestOptions(0, False, 0)))
    with serving(build("llama"), tables(NUM_SLOTS)) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.UNPROVEN
    assert proof.doubts[0] == "Nothing seems to have come from a cache."


@contextmanager
def two_models(socket: str) -> Iterator[tuple[Address, Address]]:
    """Servers of two models of one name and shape, on one sidecar."""
    config = {**tables(FEW_SLOTS), "sidecar": f"unix://{socket}"}
    del config["host"]
    other = build("llama")
    with torch.no_grad():
        for weights in other.parameters():
            weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    with serving(build("llama"), config) as one, serving(other, config) as second:
        for server in (one, second):
            come_true(lambda server=server: metric(server, "kvtier_sidecar_attached") == 1)
        yield one, second
