"""`/v1/kvtier/explain` of a sidecar: what an endpoint was told of, over HTTP."""

import time

from sidecars import running_sidecar, small_config

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.device.ghosts import Ghosts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.tier import Reason

CHUNK = 8
PROMPT = list(range(3 * CHUNK + 2))
EXPLAIN = "/v1/kvtier/explain"


def test_a_lookup_is_explained_by_its_id_and_by_its_prompt() -> None:
    with running_sidecar(small_config()) as sidecar:
        explainer = sidecar.ask(lambda: sidecar.sidecar.layouts.begin_explaining(CHUNK, "a note"))
        chain = BlockChain(CHUNK)
        chain.extend(PROMPT)
        reasons = {Reason.NEVER_SEEN: 3 * CHUNK, Reason.LAST_BLOCK: 2}
        tokens = TokenBalance(recomputed=len(PROMPT), reasons=reasons)
        record = RequestRecord("cmpl/1", None, "m", time.time(), tokens)
        trail = Trail(CHUNK, chain.names, misses=((3 * CHUNK, Reason.NEVER_SEEN),))
        sidecar.ask(lambda: explainer.on_ended(record, trail, chain, Ghosts(8)))

        by_id = sidecar.get(f"{EXPLAIN}/cmpl%2F1")
        unknown = sidecar.get(f"{EXPLAIN}/cmpl-2")
        own = sidecar.post(EXPLAIN, json={"model": "m", "prompt": PROMPT, "request_id": "cmpl/1"})
        other = sidecar.post(EXPLAIN, json={"model": "m", "prompt": PROMPT[:-1], "request_id": "cmpl/1"})
        no_model = sidecar.post(EXPLAIN, json={"model": "m", "prompt": PROMPT})
        text = sidecar.post(EXPLAIN, json={"model": "m", "prompt": "a text"})

    (found,) = own.json()["data"]
    assert by_id.json()["data"] == [found]
    assert [(row["end"], row["missed"]) for row in found["rows"]] == [(24, "never_seen"), (26, "last_block")]
    assert found["notes"] == ["a note"]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "other_prompt")
    assert (no_model.status_code, no_model.json()["error"]["code"]) == (404, "no_model")
    assert text.status_code == 400


def test_without_a_endpoint_that_is_told_of_prompts_nothing_is_known() -> None:
    with running_sidecar(small_config()) as sidecar:
        asked = sidecar.get(f"{EXPLAIN}/x"), sidecar.post(EXPLAIN, json={"model": "m", "prompt": PROMPT})

    assert [answer.status_code for answer in asked] == [404, 404]
