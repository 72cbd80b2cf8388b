"""A prompt is explained as the request with it will be, also where the planner would rather compute than load."""

from collections.abc import Callable
from pathlib import Path

import pytest
from stepped_core import BLOCK_SIZE, add, engine, finish, prompt_of, store_prompt
from transformers import PreTrainedModel

from kvtier.engine.core import EngineCore
from kvtier.engine.observability.explain.explanation import Explanation
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.up.load_planner import Demand, LoadPlan

PROMPT = prompt_of(1, 300)  # 18 whole blocks that may hit
ON_DEVICE = 4 * BLOCK_SIZE
HIT = 18 * BLOCK_SIZE
MIDDLE = 11 * BLOCK_SIZE
PLANS: dict[str, Callable[[Demand], LoadPlan]] = {
    "all": lambda demand: LoadPlan(0, HIT),
    "part": lambda demand: LoadPlan(0, MIDDLE),
    "nothing": lambda demand: LoadPlan(0, int(demand.ends[0])),
    "split": lambda demand: LoadPlan(MIDDLE, HIT),
}
ANSWERS = {
    "all": [(ON_DEVICE, Tier.DEVICE, None), (HIT, Tier.DISK, None)],
    "part": [(ON_DEVICE, Tier.DEVICE, None), (MIDDLE, Tier.DISK, None), (HIT, None, Reason.COST)],
    "nothing": [(ON_DEVICE, Tier.DEVICE, None), (HIT, None, Reason.COST)],
    "split": [(ON_DEVICE, Tier.DEVICE, None), (MIDDLE, None, Reason.COST), (HIT, Tier.DISK, None)],
}


def answers(found: Explanation) -> list[tuple[int, Tier | None, object]]:
    return [(row.end, row.tier, row.why) for row in found.rows]


def with_front_on_device(core: EngineCore) -> None:
    add(core, PROMPT[: ON_DEVICE + 1], max_tokens=1)
    finish(core)


@pytest.mark.parametrize("kind", PLANS)
def test_what_the_planner_would_compute_costs_too_much_to_load(
    model: PreTrainedModel, tmp_path: Path, kind: str
) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with engine(model, folder=tmp_path, load="split") as core:
        with_front_on_device(core)
        core.planner.best = lambda demand, *_: PLANS[kind](demand)

        asked = core.explain_prompt(core.chain(PROMPT, NO_EXTRA_KEYS)).explanation()
        request = add(core, PROMPT, max_tokens=1)
        finish(core)
        ended = core.explainer.find(request.timeline.caller.request_id, None)[-1]
        past = core.explainer.evidence(ended).explanation()

    assert answers(asked) == [*ANSWERS[kind], (len(PROMPT), None, Reason.LAST_BLOCK)]
    assert answers(past) == answers(asked)


def test_the_planner_is_asked_as_for_a_request_and_counts_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with engine(model, folder=tmp_path, load="split") as core:
        add(core, prompt_of(2, 400), max_tokens=1)
        core.step()  # its prompt is computed in more than one
        for num_tokens in (32, 64, 64):
            core.planner.prefill.on_computed(num_tokens, 0, num_tokens / 100)
        best, heard = core.planner.best, []

        def listening(demand: Demand, num_tokens: int, busy_s: float, speeds: object) -> LoadPlan:
            heard.append((demand.ends.tolist(), num_tokens, busy_s))
            return best(demand, num_tokens, busy_s, speeds)

        core.planner.best = listening
        core.explain_prompt(core.chain(PROMPT, NO_EXTRA_KEYS)).explanation()
        counted = dict(core.planner.num_plans)
        add(core, PROMPT, max_tokens=1)
        core.scheduler.schedule()

        assert heard[0] == heard[1]
        assert heard[0][2] > 0, "another request's prompt is to be computed first"
        assert counted == {}
        assert core.planner.num_plans.total() == 1


def test_where_all_is_loaded_nothing_costs_too_much(model: PreTrainedModel, tmp_path: Path) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with engine(model, folder=tmp_path, load="always") as core:
        core.planner.best = lambda demand, *_: PLANS["nothing"](demand)
        found = core.explain_prompt(core.chain(PROMPT, NO_EXTRA_KEYS)).explanation()

    assert answers(found) == [(HIT, Tier.DISK, None), (len(PROMPT), None, Reason.LAST_BLOCK)]
