"""`CodecChoice`: chooses between raw and compressed blocks by the measured speeds of reading and decoding."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier.store.codec.codec import NO_CODEC, Codec

_BLOCKS_PER_SAMPLE = 64  # encoding and decoding a sample of 1 MiB takes 3 ms, so 0.05 ms per block
_MIN_READS = 16  # reads from disk before its speed counts as measured
_MARGIN = 0.9  # switch if the other codec takes less than this fraction of the current codec's time
_FADING = 15 / 16  # factor by which each observation lowers the weight of the earlier ones


@dataclass(slots=True)
class _Rate:
    """Running means of *amount* and *cost* (for example, bytes and seconds) over about the last 16 observations."""

    amount: float = 0.0
    cost: float = 0.0
    num_seen: int = 0

    def add(self, amount: float, cost: float) -> None:
        if amount > 0 and cost > 0:  # otherwise the clock was too coarse, or the block was empty
            self.amount = _FADING * self.amount + amount
            self.cost = _FADING * self.cost + cost
            self.num_seen += 1

    @property
    def cost_of_one(self) -> float:
        return self.cost / self.amount


class CodecChoice:
    """The choice between the codecs `none` and *compressed*: whichever makes reading a block from disk faster.

    Reading a raw byte takes 1 / disk seconds with `none`, and 1 / (ratio * disk) + 1 / decoding with *compressed*. Here
    *disk* and *decoding* are speeds and *ratio* is the compression ratio, all of them measured. The choice is `none`
    until enough reads were measured. It changes only for a gain of a tenth, so that it does not flap.

    The choice ignores that compression slows down writing, and that it saves disk space. All methods are thread-safe.
    """

    def __init__(self, compressed: Codec, clock: Callable[[], float] = time.perf_counter) -> None:
        assert compressed.is_lossless, f"{compressed.name} is lossy, so a key would have two contents; use another"
        self._compressed = compressed
        self._clock = clock
        self._lock = threading.Lock()  # guards everything below
        self._num_picked = 0
        self._chosen: Codec = NO_CODEC
        self._medium = _Rate()  # stored bytes per second
        self._ratio = _Rate()  # raw bytes per stored byte, by *compressed*
        self._decoding = _Rate()  # raw bytes per second, by *compressed*

    def __reduce__(self) -> "tuple[type[CodecChoice], tuple[Codec]]":
        return type(self), (self._compressed,)  # pickled for the store's process, which takes its own measurements

    def pick(self, raw: memoryview) -> Codec:
        """Return the codec for the block *raw*. The first and every 64th block are encoded to measure speeds.

        Raises ValueError if a block to measure cannot be encoded by the compressing codec.
        """
        with self._lock:
            is_sample = self._num_picked % _BLOCKS_PER_SAMPLE == 0
            self._num_picked += 1
        if is_sample:
            self._measure(raw)
        with self._lock:
            return self._chosen

    def on_read(self, stored_bytes: int, seconds: float) -> None:
        """Count a read of *stored_bytes* that took *seconds* on disk, without decoding and verification."""
        with self._lock:
            self._medium.add(stored_bytes, seconds)
            self._decide()

    def _measure(self, raw: memoryview) -> None:
        payload = self._compressed.encode(raw)
        out = np.empty(raw.nbytes, dtype=np.uint8).data
        started = self._clock()
        self._compressed.decode(payload, out)
        seconds = self._clock() - started
        with self._lock:
            self._ratio.add(raw.nbytes, payload.nbytes)
            self._decoding.add(raw.nbytes, seconds)
            self._decide()

    def _decide(self) -> None:
        if self._medium.num_seen < _MIN_READS or self._decoding.num_seen == 0:
            return
        as_it_is = self._medium.cost_of_one
        compressed = self._medium.cost_of_one * self._ratio.cost_of_one + self._decoding.cost_of_one
        if self._chosen is NO_CODEC and compressed < _MARGIN * as_it_is:
            self._chosen = self._compressed
        elif self._chosen is not NO_CODEC and as_it_is < _MARGIN * compressed:
            self._chosen = NO_CODEC
