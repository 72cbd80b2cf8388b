"""The choice of a codec follows the speeds it is told and measures; here both are made up."""

import random
import threading
from itertools import count

from store_cases import blob_of

from kvtier.store.codec.codec import NO_CODEC, ZstdPlaneCodec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.codec.seal import seal

BLOCK_BYTES = 1 << 20
BLOCK = memoryview(bytes(BLOCK_BYTES))


class MadeUpCodec(ZstdPlaneCodec):
    """Halves every block and takes a second for each *decode_speed* bytes of it, on a clock of its own."""

    def __init__(self, decode_speed: float) -> None:
        super().__init__(2)
        self.decode_speed = decode_speed
        self.now = 0.0
        self.num_encoded = 0

    def clock(self) -> float:
        return self.now

    def encode(self, raw: memoryview) -> memoryview:
        self.num_encoded += 1
        return raw[: raw.nbytes // 2]

    def decode(self, payload: memoryview, out: memoryview) -> None:
        self.now += out.nbytes / self.decode_speed


def choice_of(codec: MadeUpCodec) -> CodecChoice:
    return CodecChoice(codec, codec.clock)


def read_at(choice: CodecChoice, medium_speed: float, num_reads: int = 200) -> None:
    for _ in range(num_reads):
        choice.on_read(BLOCK_BYTES, BLOCK_BYTES / medium_speed)


def test_nothing_is_compressed_before_reads_were_measured() -> None:
    choice = choice_of(MadeUpCodec(1e9))

    assert choice.pick(BLOCK) is NO_CODEC
    read_at(choice, 1e6, num_reads=15)
    assert choice.pick(BLOCK) is NO_CODEC


def test_a_slow_disk_picks_the_codec_and_a_fast_one_none() -> None:
    # 1 / disk against 1 / (2 * disk) + 1 / 1 GB/s: they are even at 0.5 GB/s
    for medium_speed, is_compressed in ((0.1e9, True), (0.4e9, True), (0.6e9, False), (5e9, False)):
        codec = MadeUpCodec(1e9)
        choice = choice_of(codec)
        choice.pick(BLOCK)

        read_at(choice, medium_speed)

        assert (choice.pick(BLOCK) is codec) == is_compressed, medium_speed


def test_a_slow_decoder_is_not_picked_for_a_slow_disk() -> None:
    choice = choice_of(MadeUpCodec(0.1e9))
    choice.pick(BLOCK)

    read_at(choice, 0.1e9)

    assert choice.pick(BLOCK) is NO_CODEC


def test_the_choice_follows_a_disk_that_becomes_slow_and_fast_again() -> None:
    codec = MadeUpCodec(1e9)
    choice = choice_of(codec)
    choice.pick(BLOCK)
    picked = []
    for medium_speed in (5e9, 0.1e9, 5e9):
        read_at(choice, medium_speed)
        picked.append(choice.pick(BLOCK))

    assert picked == [NO_CODEC, codec, NO_CODEC]


def test_speeds_that_waver_around_the_even_one_change_nothing() -> None:
    for first in (0.1e9, 5e9):
        choice = choice_of(MadeUpCodec(1e9))
        choice.pick(BLOCK)
        read_at(choice, first)
        before = choice.pick(BLOCK)
        rng = random.Random(1)
        for _ in range(1000):
            read_at(choice, rng.uniform(0.47e9, 0.53e9), num_reads=1)

            assert choice.pick(BLOCK) is before


def test_one_block_in_64_is_measured() -> None:
    codec = MadeUpCodec(1e9)
    choice = choice_of(codec)

    for _ in range(129):
        choice.pick(BLOCK)

    assert codec.num_encoded == 3


def test_empty_blocks_and_a_coarse_clock_teach_nothing() -> None:
    choice = choice_of(MadeUpCodec(float("inf")))
    choice.pick(BLOCK[:0])
    choice.pick(BLOCK)

    choice.on_read(0, 1.0)
    choice.on_read(BLOCK_BYTES, 0.0)

    assert choice.pick(BLOCK) is NO_CODEC


def test_a_block_is_sealed_with_what_was_picked() -> None:
    choice = CodecChoice(ZstdPlaneCodec(2), count(0.0, 1e-4).__next__)  # it decodes in 0.1 ms
    blob = blob_of(1, 100_000)
    raw_length = seal(blob, choice).payload.nbytes

    read_at(choice, 1e6)

    assert (raw_length, seal(blob, choice).payload.nbytes < 90_000) == (100_000, True)


def test_several_threads_share_a_choice() -> None:
    codec = MadeUpCodec(1e9)
    choice = choice_of(codec)
    blob = blob_of(1, 10_000)

    def work() -> None:
        for _ in range(300):
            choice.pick(blob.raw)
            read_at(choice, 1e6, num_reads=1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert codec.num_encoded == -(-1200 // 64)  # every 64th is measured
    assert choice.pick(blob.raw) is codec
