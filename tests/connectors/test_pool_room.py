"""Room in vLLM's host pool: requests wait for it, not for ever, and none takes more than the pool has."""

from chaos import FakeClock

from kvtier.connectors.vllm_offloading.pool_room import MAX_POOLS, MAX_WAIT_S, HostPool, PoolRoom, Verdict

NUM_CHUNKS = 4


class Pool:
    """vLLM's host pool, as far as its room goes."""

    def __init__(self) -> None:
        self.num_available = NUM_CHUNKS
        self.clock = FakeClock()
        self.room = PoolRoom(NUM_CHUNKS, self.clock)
        self.touched: list[list[bytes]] = []
        self.room.see(HostPool(lambda: self.num_available, lambda keys: self.touched.append(list(keys))))

    def look_up(self, request_id: str, num_blocks: int, first: int = 0) -> list[Verdict]:
        verdicts = []
        for number in range(first, first + num_blocks):
            verdicts.append(self.room.verdict(request_id, b"%d" % number))
            self.num_available -= verdicts[-1] is Verdict.LOAD
        return verdicts


def test_a_request_waits_while_others_fill_the_pool_and_loads_afterwards() -> None:
    pool = Pool()

    first = pool.look_up("first", 3)
    second = pool.look_up("second", 3)
    pool.room.on_step_end(["first"])
    pool.num_available = 3
    later = pool.look_up("second", 2, first=1)

    assert first == [Verdict.LOAD] * 3
    assert second == [Verdict.LOAD, Verdict.WAIT, Verdict.WAIT]
    assert later == [Verdict.LOAD] * 2


def test_a_later_request_takes_no_room_while_an_earlier_one_waits() -> None:
    pool = Pool()
    pool.num_available = 1
    pool.look_up("earlier", 2)
    pool.num_available = 1

    in_this_step = pool.look_up("later", 1)
    pool.room.on_step_end()
    in_the_next_step = pool.look_up("later", 1)

    assert (in_this_step, in_the_next_step) == ([Verdict.WAIT], [Verdict.LOAD])


def test_a_request_does_not_take_the_room_of_an_earlier_ones_blocks_until_that_one_runs() -> None:
    pool = Pool()
    pool.look_up("earlier", NUM_CHUNKS - 1)
    pool.room.on_step_end()
    pool.num_available = NUM_CHUNKS  # the blocks of the earlier one are in the pool, and evictable

    before = pool.look_up("later", 2)
    pool.room.on_step_end(["earlier"])
    after = pool.look_up("later", 2)

    assert before == [Verdict.LOAD, Verdict.WAIT]
    assert after == [Verdict.LOAD] * 2


def test_a_request_whose_blocks_were_evicted_loads_them_before_a_later_one_that_waits() -> None:
    pool = Pool()
    pool.look_up("earlier", NUM_CHUNKS)
    pool.room.on_step_end()
    pool.num_available = NUM_CHUNKS

    verdicts = [*pool.look_up("later", 1), *pool.look_up("earlier", 1), *pool.look_up("later", 1)]

    assert verdicts == [Verdict.WAIT, Verdict.LOAD, Verdict.WAIT]


def test_a_preempted_request_that_loads_again_keeps_no_room_from_others() -> None:
    pool = Pool()
    pool.look_up("preempted", NUM_CHUNKS)
    pool.room.on_step_end(["preempted"])
    pool.num_available = NUM_CHUNKS
    pool.look_up("preempted", NUM_CHUNKS)
    pool.room.on_step_end()
    pool.num_available = NUM_CHUNKS

    assert pool.look_up("later", NUM_CHUNKS) == [Verdict.LOAD] * NUM_CHUNKS


def test_the_blocks_of_ended_requests_are_evicted_before_those_of_requests_that_still_load() -> None:
    pool = Pool()
    pool.look_up("ends", 2)
    pool.look_up("first", 1, first=2)
    pool.look_up("second", 2, first=3)
    pool.room.on_step_end(["ends"])
    pool.room.on_finished("ends")
    pool.num_available = NUM_CHUNKS

    later = pool.look_up("second", 2, first=4)

    assert later == [Verdict.LOAD] * 2
    assert pool.touched == [[b"2", b"3"]]


def test_nothing_is_touched_while_the_pool_has_room() -> None:
    pool = Pool()
    pool.look_up("ends", 1)
    pool.look_up("loads", 1, first=1)
    pool.room.on_step_end(["ends"])
    pool.room.on_finished("ends")

    pool.look_up("loads", 1, first=2)

    assert not pool.touched


def test_a_request_that_has_waited_too_long_computes() -> None:
    pool = Pool()
    pool.num_available = 0

    early = pool.look_up("request", 1)
    pool.clock.now += MAX_WAIT_S
    late = pool.look_up("request", 1)

    assert (early, late) == ([Verdict.WAIT], [Verdict.COMPUTE])


def test_a_request_loads_no_more_blocks_than_the_pool_has() -> None:
    pool = Pool()

    pool.look_up("request", NUM_CHUNKS)
    pool.num_available = NUM_CHUNKS

    assert pool.look_up("request", 1, first=NUM_CHUNKS) == [Verdict.COMPUTE]


def test_a_request_whose_blocks_are_evicted_before_their_use_loads_them_again_a_few_times() -> None:
    pool = Pool()

    for _ in range(MAX_POOLS):
        pool.num_available = NUM_CHUNKS
        assert pool.look_up("request", NUM_CHUNKS) == [Verdict.LOAD] * NUM_CHUNKS
    pool.num_available = NUM_CHUNKS

    assert pool.look_up("request", 1) == [Verdict.COMPUTE]


def test_requests_of_the_first_step_share_an_empty_pool() -> None:
    room = PoolRoom(NUM_CHUNKS, FakeClock())

    verdicts = [room.verdict(request_id, b"%d" % i) for request_id in ("first", "second") for i in range(3)]

    assert verdicts == [Verdict.LOAD] * 4 + [Verdict.WAIT] * 2


def test_a_request_that_has_ended_is_forgotten_and_is_known_to_have_waited() -> None:
    pool = Pool()
    pool.look_up("loads", NUM_CHUNKS)
    pool.look_up("waits", 1)
    pool.room.on_step_end()
    pool.num_available = NUM_CHUNKS

    assert not pool.room.on_finished("loads")
    assert pool.room.on_finished("waits")
    assert not pool.room.on_finished("waits")
    assert pool.look_up("loads", 1) == [Verdict.LOAD]
