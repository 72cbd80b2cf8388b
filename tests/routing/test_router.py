"""Router: replicas that come and go, and what others have sent to them."""

import numpy as np

from kvtier.routing.config import IndexConfig, PolicyConfig
from kvtier.routing.fingerprints import Fingerprints
from kvtier.routing.kv_event import BlockStored, EventBatch
from kvtier.routing.policy import Reason
from kvtier.routing.question import Question
from kvtier.routing.replica import Health, Replica
from kvtier.routing.router import MAX_TOKENS, RoutedPrompt, Router

SIZE = 16
TOKENS = list(range(64 * SIZE))


def made(*names: str) -> Router:
    router = Router(PolicyConfig(), IndexConfig(), Fingerprints(key=1))
    for name in names:
        router.add(Replica(name, health=Health.READY))
    return router


def stores(router: Router, name: str) -> None:
    blocks = list(range(1, 1 + len(TOKENS) // SIZE))
    router.learn(name, EventBatch(0.0, [BlockStored(blocks, None, TOKENS, SIZE)]))


def prompt(router: Router, session: bytes | None = None) -> RoutedPrompt:
    return router.prompt(Question(b"", session=session), np.array(TOKENS, dtype=np.uint32), None, "")


def chosen(router: Router, session: bytes | None = None) -> tuple[str, Reason] | None:
    routed = router.choose(prompt(router, session))
    return None if routed is None else (routed.choice.name, routed.choice.reason)


def test_a_replica_that_comes_later_is_chosen_for_what_it_has() -> None:
    router = made("a", "b")
    router.add(Replica("c", health=Health.READY))
    stores(router, "c")

    assert chosen(router) == ("c", Reason.PREFIX)


def test_of_a_replica_that_has_gone_nothing_is_known() -> None:
    router = made("a", "b")
    stores(router, "a")
    router.sent(prompt(router, b"a chat"), "a")
    router.remove("a")

    assert chosen(router, b"a chat") == ("b", Reason.HASH)
    assert router.any_open(b"a key") == "b"

    router.add(Replica("a", health=Health.READY))
    assert router.index.matched(prompt(router).views[0]) == {}


def test_nobody_is_chosen_before_a_replica_comes() -> None:
    router = made()

    assert chosen(router) is None
    assert router.any_open(b"a key") is None


def test_what_others_have_sent_to_a_replica_counts_as_load() -> None:
    router = made("a", "b")
    stores(router, "a")
    router.replicas["a"].num_elsewhere = 20

    assert chosen(router) == ("b", Reason.LOAD)


def test_one_long_prompt_displaces_a_small_part_of_what_is_known() -> None:
    router = made("a", "b")
    stores(router, "a")
    long = router.prompt(Question(b""), np.zeros(4 * MAX_TOKENS, dtype=np.uint32), None, "")
    router.sent(long, "b")

    assert long.num_tokens == 4 * MAX_TOKENS  # what it costs to compute is known all the same
    assert router.index.num_prefixes <= len(TOKENS) // SIZE + MAX_TOKENS // SIZE
    assert router.choose(long).choice.name == "b"


def test_a_replica_that_lies_about_sizes_and_adapters_takes_a_bounded_room() -> None:
    router = made("a")
    stores(router, "a")
    for number in range(10_000):
        size = 17 + number % 500
        router.learn(
            "a", EventBatch(0.0, [BlockStored([-1 - number], None, [7] * size, size, lora_name=f"lora {number}")])
        )

    assert router.index.block_sizes[0] == SIZE
    assert len(router.index.loras) <= 4096
    assert "lora 9999" in router.index.loras
