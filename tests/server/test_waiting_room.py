"""The waiting room between tenants: shares, turns, and which visits give way."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from serving import DEADLINE_S

from kvtier.server.waiting_room import RoomFull, Visit, WaitingRoom


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Guest:
    """A request that enters, waits for its turn, and stays until the test has it leave."""

    def __init__(self, room: WaitingRoom, tenant: str, num_completions: int = 1, priority: int = 0) -> None:
        self.tenant = tenant
        self.leave = asyncio.Event()
        self.visit: Visit | None = None
        self.task = asyncio.create_task(self.stay(room, num_completions, priority))

    async def stay(self, room: WaitingRoom, num_completions: int, priority: int) -> None:
        with room.enter(num_completions, self.tenant, priority) as self.visit:
            await self.visit.wait_for_turn()
            await self.leave.wait()

    @property
    def has_turn(self) -> bool:
        return self.visit is not None and self.visit.has_turn


def refused(enter: Callable[[], object]) -> int:
    """After how many seconds the refused request may come again."""
    with pytest.raises(RoomFull) as full:
        enter()
    return full.value.retry_after_s


def story(tell: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(tell(), DEADLINE_S))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_tenant_may_fill_the_room_and_gives_way_to_another_one_that_has_less_than_its_share() -> None:
    async def tell() -> None:
        room = WaitingRoom(6, num_turns=2, num_tenants=3)
        greedy = [Guest(room, "greedy") for _ in range(6)]
        await settle()
        assert room.num_inside == 6

        modest = [Guest(room, "modest") for _ in range(3)]
        await settle()

        sent_away = [guest for guest in greedy if guest.task.done()]
        assert sent_away == greedy[4:]
        assert all(isinstance(guest.task.exception(), RoomFull) for guest in sent_away)
        assert [guest.task.done() for guest in modest] == [False, False, True]  # a share is two
        assert isinstance(modest[2].task.exception(), RoomFull)
        assert room.num_inside == 6
        for guest in (*greedy, *modest):
            guest.leave.set()
        await asyncio.gather(*(guest.task for guest in (*greedy, *modest)), return_exceptions=True)
        assert room.num_inside == 0

    story(tell)


def test_whoever_has_its_turn_does_not_give_way() -> None:
    async def tell() -> None:
        room = WaitingRoom(2, num_turns=2, num_tenants=2)
        greedy = [Guest(room, "greedy") for _ in range(2)]
        await settle()

        modest = Guest(room, "modest")
        await settle()

        assert all(guest.has_turn and not guest.task.done() for guest in greedy)
        assert isinstance(modest.task.exception(), RoomFull)
        for guest in greedy:
            guest.leave.set()
        await asyncio.gather(*(guest.task for guest in greedy))

    story(tell)


def test_turns_go_to_the_tenant_with_the_fewest_and_within_it_to_the_most_urgent() -> None:
    async def tell() -> None:
        room = WaitingRoom(20, num_turns=2, num_tenants=2)
        first = [Guest(room, "a") for _ in range(2)]
        await settle()
        waiting = {
            "a oldest": Guest(room, "a"),
            "a urgent": Guest(room, "a", priority=-100),
            "b": Guest(room, "b"),
            "b urgent": Guest(room, "b", priority=-1),
        }
        await settle()
        order = []

        for guest in (*first, *waiting.values()):
            guest.leave.set()
            await settle()
            order += [name for name, each in waiting.items() if each.has_turn and name not in order]

        assert order == ["b urgent", "a urgent", "a oldest", "b"]  # one each, then the tenant with none left

    story(tell)


def test_the_time_to_come_again_tells_nothing_of_another_tenant() -> None:
    def wait_of_modest(num_greedy: int, greedy_s: float) -> int:
        clock = Clock()
        room = WaitingRoom(4, clock, num_turns=4, num_tenants=2)
        for _ in range(5):
            with room.enter(1, "greedy"):
                clock.now += greedy_s
            with room.enter(2, "modest"):
                clock.now += 3.0
        with room.enter(num_greedy, "greedy"), room.enter(4 - num_greedy, "modest"):
            return refused(lambda: room.enter(3, "modest").__enter__())

    waits = {wait_of_modest(num_greedy=2, greedy_s=seconds) for seconds in (1.0, 100.0)}

    assert len(waits) == 1


def test_a_client_that_leaves_while_it_is_sent_away_is_only_gone() -> None:
    async def tell() -> None:
        room = WaitingRoom(2, num_turns=1, num_tenants=2)
        greedy = [Guest(room, "greedy") for _ in range(2)]
        await settle()

        with room.enter(1, "modest"):
            greedy[1].task.cancel()
            await settle()

        assert greedy[1].task.cancelled()
        greedy[0].leave.set()
        await greedy[0].task
        assert room.num_inside == 0

    story(tell)


def test_random_guests_of_tenants_neither_overfill_the_room_nor_wait_for_ever() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")

    async def tell() -> None:
        rng, num_tenants = random.Random(seed), 3
        room = WaitingRoom(12, num_turns=4, num_tenants=num_tenants)
        guests: list[Guest] = []
        for _ in range(600):
            guests.append(Guest(room, str(rng.randrange(num_tenants)), rng.choice([1, 1, 2, 6]), rng.randrange(-2, 3)))
            rng.choice(guests).leave.set()
            if rng.random() < 0.2:
                rng.choice(guests).task.cancel()
            await settle()
            in_turn: Counter[str] = Counter()
            for guest in guests:
                if guest.has_turn and not guest.task.done():
                    in_turn[guest.tenant] += guest.visit.num_completions
            assert room.num_inside <= 12
            assert in_turn.total() <= 6
        for guest in guests:
            guest.leave.set()
        outcomes = await asyncio.gather(*(guest.task for guest in guests), return_exceptions=True)

        assert {type(outcome) for outcome in outcomes} <= {type(None), RoomFull, asyncio.CancelledError}
        assert room.num_inside == 0

    story(tell)
