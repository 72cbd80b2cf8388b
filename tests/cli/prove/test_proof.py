"""What a proof says of servers that are right, of those that are wrong in known ways, and of those that tell little."""

import itertools
import sys
from collections.abc import Hashable

import pytest
from fake_completions import BLOCK_SIZE, Block, FakeServer, fake_server

from kvtier.cli.prove.endpoint import Endpoint, Refused
from kvtier.cli.prove.judgement import Verdict
from kvtier.cli.prove.proof import Proof, ProofConfig, prove
from kvtier.cli.prove.push_out import EvictionStep

pytestmark = pytest.mark.long

LENGTH = 200
MODELS = ("small", "legal", "sql")


def proof_of(server: FakeServer, other: FakeServer | None = None, **options: object) -> Proof:
    order: dict = {
        "endpoint": Endpoint(server.url, None, server.clock),
        "other": None if other is None else Endpoint(other.url, None, other.clock),
        "model": None,
        "adapters": None,
        "lengths": (LENGTH,),
        "num_rounds": 2,
        "concurrency": 4,
        "push_out": None,
        "seed": 1,
    }

    def note(what: str, *_: int) -> None:
        server.is_crowded = "concurrently" in what

    return prove(ProofConfig(**(order | options)), note)


def after_reset(server: FakeServer) -> EvictionStep:
    """The server forgets what is on its device."""
    script = f"import urllib.request as r; r.urlopen(r.Request('{server.url}/reset', b'{{}}')).read()"
    return EvictionStep(0, f'{sys.executable} -c "{script}"')


def families(proof: Proof) -> set[str]:
    """Those in which something was found."""
    return {finding.question.family if finding.question else "" for finding in proof.judgement.findings}


def verdicts(proof: Proof) -> dict[str, Verdict]:
    return {row.family: row.verdict for row in proof.judgement.rows}


def test_a_server_that_is_right_is_proven_in_each_family() -> None:
    with fake_server(models=MODELS, noise=0.01) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.PROVEN
    assert set(verdicts(proof).values()) == {Verdict.PROVEN}
    assert {"same prompt", "halves swapped", "another salt", "legal after the model", "the model after sql"} < set(
        verdicts(proof)
    )


def test_a_row_has_what_was_cached_and_the_times_of_the_first_token() -> None:
    with fake_server() as server:
        proof = proof_of(server)

    rows = {row.family: row for row in proof.judgement.rows}
    assert [rows[name].cached_tokens for name in ("same prompt", "half shared", "halves swapped")] == [192, 96, 0]
    assert rows["same prompt"].computed_ttft_s == pytest.approx(0.200)
    assert rows["same prompt"].ttft_s == pytest.approx(0.008)
    assert rows["same prompt"].num_asked == 2


def without_model(block: Block) -> Hashable:
    return block.weights, block.salt, block.tokens


def without_prefix(block: Block) -> Hashable:
    return block.weights, block.model, block.salt, block.tokens[-BLOCK_SIZE:]


def without_salt(block: Block) -> Hashable:
    return block.weights, block.model, block.tokens


def without_weights(block: Block) -> Hashable:
    return block.model, block.salt, block.tokens


def half_of_the_tokens(block: Block) -> Hashable:
    return block.weights, block.model, block.salt, block.tokens[::2]


@pytest.mark.parametrize("tells_cached", [True, False])
def test_adapters_that_are_mixed_up_are_found(tells_cached: bool) -> None:
    with fake_server(models=MODELS, name_of=without_model, noise=0.01, tells_cached=tells_cached) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.WRONG
    assert families(proof) == {"legal after the model", "sql after legal", "the model after sql"}
    assert any(what.startswith("the answer is off by") for what in whats(proof))
    assert any(what.endswith("192 more than earlier prompts share") for what in whats(proof)) == tells_cached


@pytest.mark.parametrize(
    ("name_of", "found"),
    [
        (without_prefix, {"halves swapped", "one token other"}),
        (half_of_the_tokens, {"one token other"}),
    ],
)
def test_names_that_leave_something_out_are_found(name_of: object, found: set[str]) -> None:
    with fake_server(name_of=name_of, noise=0.01) as server:
        proof = proof_of(server, num_rounds=4)

    assert proof.judgement.verdict is Verdict.WRONG
    assert families(proof) & found


def test_a_salt_that_counts_for_nothing_in_a_colder_tier_is_found_though_answers_are_right() -> None:
    with fake_server(lower_name_of=without_salt, spills_late=True) as server:
        near = proof_of(server)
        below = proof_of(server, push_out=after_reset(server), seed=2)

    assert near.judgement.verdict is Verdict.PROVEN
    assert "another salt" in families(below)
    assert all("more than earlier prompts share" in finding.what for finding in below.judgement.findings)


def test_two_models_of_one_name_on_one_cache_are_found() -> None:
    lower: dict = {}
    fault = {"lower": lower, "lower_name_of": without_weights, "noise": 0.01}
    with fake_server(**fault) as server, fake_server(**fault, weights="others") as other:
        proof = proof_of(server, other)

    assert proof.judgement.verdict is Verdict.WRONG
    assert families(proof) == {"the other server after the model", "the model after the other server"}


def test_two_servers_of_one_model_on_one_cache_are_right_and_said_to_be_alike() -> None:
    with fake_server(noise=0.01) as server, fake_server(lower=server.lower, noise=0.01) as other:
        proof = proof_of(server, other)

    assert proof.judgement.verdict is Verdict.PROVEN
    assert any(doubt.startswith("the model and the other server answer alike") for doubt in proof.doubts)


def flipped(content: bytes, server: FakeServer) -> bytes:
    return content if content[0] % 8 else bytes(32)


def flipped_beside_others(content: bytes, server: FakeServer) -> bytes:
    return flipped(content, server) if server.is_crowded else content


@pytest.mark.parametrize(
    "options",
    [{}, {"noise": 0.05}, {"tells_cached": False}, {"tells_logprobs": False}, {"takes_ids": False}],
    ids=["plain", "noisy", "no cached tokens", "no log probabilities", "words"],
)
def test_blocks_that_come_back_wrong_are_found(options: dict) -> None:
    with fake_server(read=flipped, **options) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.WRONG
    assert {"same prompt", "goes on"} < families(proof)
    assert not {"halves swapped", "another salt"} & families(proof)


@pytest.mark.parametrize("heeds", [("cache_prompt",), ()])
def test_without_salts_blocks_that_come_back_wrong_are_found_too(heeds: tuple[str, ...]) -> None:
    with fake_server(read=flipped, heeds=heeds) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.WRONG
    assert "same prompt" in families(proof)


def test_what_is_wrong_under_load_alone_is_found_among_others() -> None:
    with fake_server(read=flipped_beside_others) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.WRONG
    assert {finding.asked.is_alone for finding in proof.judgement.findings} == {False}


def test_what_is_computed_otherwise_beside_others_is_found_and_no_noise() -> None:
    with fake_server(compute=flipped_beside_others, noise=0.01) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.WRONG
    assert any(what.startswith("answers to full prefills of this prompt differ") for what in whats(proof))
    assert proof.measures.noise < 0.05
    assert [doubt for doubt in proof.doubts if "the fault is not, or not only, in the cache" in doubt]


def test_noise_that_comes_now_and_then_is_noise() -> None:
    with fake_server(noise=0.05, noisy=0.1) as server:
        proof = proof_of(server, num_rounds=4)

    assert proof.judgement.verdict is Verdict.PROVEN


def whats(proof: Proof) -> list[str]:
    return [finding.what for finding in proof.judgement.findings]


def test_a_fault_of_a_colder_tier_is_found_once_prompts_are_pushed_out() -> None:
    def read(content: bytes, server: FakeServer) -> bytes:
        return content if content in server.store.values() else flipped(content, server)

    with fake_server(read=read) as server:
        near = proof_of(server)
        below = proof_of(server, push_out=after_reset(server), seed=2)

    assert near.judgement.verdict is Verdict.PROVEN
    assert any("--evict or --between" in doubt for doubt in near.doubts)
    assert below.judgement.verdict is Verdict.WRONG
    assert not any("--evict or --between" in doubt for doubt in below.doubts)


def test_prompts_of_as_many_tokens_as_are_wanted_push_others_out() -> None:
    with fake_server() as server:
        proof_of(server)
        num_asked = server.num_asked
        proof_of(server, push_out=EvictionStep(10 * LENGTH - 1, None), seed=2)

    assert server.num_asked == 2 * num_asked + 10


@pytest.mark.parametrize(
    ("options", "doubt"),
    [
        ({"tells_logprobs": False}, "returns no log probabilities"),
        ({"tells_cached": False}, "reports no cached tokens"),
        ({"takes_ids": False}, "accepts no token ids"),
        ({"heeds": ()}, "No known way makes this server recompute a cached prompt"),
    ],
)
def test_a_server_that_tells_less_is_proven_with_a_sentence_about_it(options: dict, doubt: str) -> None:
    with fake_server(**options) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.PROVEN
    assert [each for each in proof.doubts if doubt in each]


def test_a_server_that_is_told_to_look_nothing_up_is_asked_cold_so() -> None:
    with fake_server(heeds=("cache_prompt",)) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.PROVEN
    assert "another salt" not in verdicts(proof)
    assert verdicts(proof)["half shared"] is Verdict.PROVEN


@pytest.mark.parametrize(
    ("options", "doubt"),
    [
        ({"caches": False}, "Nothing seems to have come from a cache."),
        ({"caches": False, "tells_cached": False}, "Nothing seems to have come from a cache."),
        ({"hangs_on_prompt": False}, "answers vary with the beginning of the prompt hardly more than"),
        ({"noise": 6.0}, "answers vary with the beginning of the prompt hardly more than"),
        ({"noise": 6.0, "tells_logprobs": False}, "answers vary with the beginning of the prompt hardly more than"),
    ],
)
def test_where_nothing_can_be_told_nothing_is_proven(options: dict, doubt: str) -> None:
    with fake_server(**options) as server:
        proof = proof_of(server)

    assert proof.judgement.verdict is Verdict.UNPROVEN
    assert [each for each in proof.doubts if doubt in each]
    assert Verdict.PROVEN not in [row.verdict for row in proof.judgement.rows if row.shares]


def test_cached_tokens_that_save_no_time_are_doubted() -> None:
    with fake_server() as server:
        sooner = proof_of(server)
        ticks = itertools.count()
        no_sooner = proof_of(server, endpoint=Endpoint(server.url, None, lambda: float(next(ticks))), seed=2)

    assert not [doubt for doubt in sooner.doubts if "came no sooner" in doubt]
    assert [doubt for doubt in no_sooner.doubts if "the server reports 192 cached tokens, but" in doubt]


def test_an_answers_distance_to_itself_computed_in_another_shape_is_noise() -> None:
    with fake_server(noise=0.0) as server:
        measured = proof_of(server).measures
    with fake_server(tells_ids=True, noise=0.02) as server:
        noisy = proof_of(server).measures

    assert (measured.noise, measured.bound) == (pytest.approx(0.0, abs=1e-12), 0.001)
    assert len(measured.evidence.shapes) == len(noisy.evidence.shapes) == 3
    assert 0.01 < noisy.noise <= 0.04
    assert noisy.bound == pytest.approx(3 * noisy.noise)


def test_an_adapter_can_be_named_and_one_that_is_not_there_is_refused() -> None:
    with fake_server(models=MODELS) as server:
        named = proof_of(server, adapters=["sql"])
        with pytest.raises(Refused, match="there is no model tax"):
            proof_of(server, adapters=["tax"])

    assert [asker.model for asker in named.askers] == ["small", "sql"]


def test_lengths_fit_the_model() -> None:
    with fake_server(max_model_len=600) as server:
        fitting = proof_of(server, lengths=None)
        with pytest.raises(ValueError, match=r"--lengths 600: the model takes at most 600 tokens; give 483"):
            proof_of(server, lengths=(600,))

    assert {row.length for row in fitting.judgement.rows} == {200}


def test_a_server_that_fails_meanwhile_is_an_error() -> None:
    with fake_server(fails_after=50) as server, pytest.raises(Refused, match="500 the engine has ended"):
        proof_of(server)
