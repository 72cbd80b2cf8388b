"""A sidecar that does not answer: asked, then left alone, and taken back when it speaks."""

from chaos import FakeClock

from kvtier.engine.attached.link import ASK_AFTER_S, LOST_AFTER_S, MAX_STEP_S, Silence


class Bed:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.num_asked = 0
        self.silence = Silence(self.ask, self.clock)

    def ask(self) -> None:
        self.num_asked += 1

    def listen(self, seconds: float, is_waited_for: bool = True) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += MAX_STEP_S / 2
            self.silence.look(is_waited_for)


def test_one_that_says_nothing_while_it_should_is_asked_once_and_then_lost() -> None:
    bed = Bed()

    bed.listen(ASK_AFTER_S + MAX_STEP_S)
    assert (bed.num_asked, bed.silence.is_lost) == (1, False)
    bed.listen(LOST_AFTER_S)

    assert (bed.num_asked, bed.silence.is_lost) == (1, True)
    bed.silence.on_answers()
    assert not bed.silence.is_lost


def test_one_that_is_to_say_nothing_may_be_silent_for_ever() -> None:
    bed = Bed()

    bed.listen(100 * LOST_AFTER_S, is_waited_for=False)

    assert (bed.num_asked, bed.silence.is_lost) == (0, False)


def test_one_that_says_it_lives_may_take_its_time() -> None:
    bed = Bed()

    for _ in range(50):
        bed.listen(LOST_AFTER_S / 2)
        bed.silence.on_answers()

    assert not bed.silence.is_lost


def test_an_engine_that_was_stopped_itself_has_not_listened() -> None:
    bed = Bed()
    bed.silence.look(True)

    bed.clock.now += 1000.0
    bed.silence.look(True)

    assert not bed.silence.is_lost
