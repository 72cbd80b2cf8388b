"""Streams and events of a fake device, as `torch.cuda` has them, and each thread's current stream."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fake_cuda.device import FakeDevice, Operation, StreamState


class Stream:
    """Stands for `torch.cuda.Stream`. `cuda_stream` is 0 for the legacy default stream, as there."""

    def __init__(self, device: FakeDevice, state: StreamState) -> None:
        self._device = device
        self.state = state

    @property
    def cuda_stream(self) -> int:
        return self.state.stream_id

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event(self._device) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        if event.recorded is None:
            raise self._device.note_misuse("a stream waits for an event that was never recorded, which is no wait")
        self._device.enqueue(self.state, "a wait for an event", seconds=0.0, waits_for=event.recorded)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        if self.state.last is not None:
            self._device.wait(self.state.last)

    def query(self) -> bool:
        return self.state.last is None or self.state.last.is_done


class Event:
    """Stands for `torch.cuda.Event`. Waiting for one that was never recorded returns at once, as CUDA does."""

    def __init__(self, device: FakeDevice, enable_timing: bool = False) -> None:
        self._device = device
        self.has_time = enable_timing
        self.recorded: Operation | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = self._device.enqueue(stream.state, "an event", seconds=0.0)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        if self.recorded is not None:
            self._device.wait(self.recorded)

    def query(self) -> bool:
        return self.recorded is None or self.recorded.is_done

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds of the device's time; CudaMisuse if either has not happened yet, or has no time."""
        first, last = self.recorded, end_event.recorded
        if first is None or last is None or not (self.has_time and end_event.has_time):
            raise self._device.note_misuse("the time between events that were not recorded, or without timing")
        if not (first.is_done and last.is_done):
            raise self._device.note_misuse("the time between events before they have happened")
        return (last.done_at - first.done_at) * 1000


class CurrentStreams(threading.local):
    """Each thread's current stream: the default one until it takes another."""

    def __init__(self, device: FakeDevice) -> None:
        self._default = Stream(device, device.default_stream)
        self._taken: list[Stream] = []

    @property
    def current(self) -> Stream:
        return self._taken[-1] if self._taken else self._default

    @contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        """Make *stream* the thread's current one within the block; None changes nothing."""
        self._taken.append(self.current if stream is None else stream)
        try:
            yield
        finally:
            self._taken.pop()
