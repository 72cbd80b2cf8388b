"""CudaLane: runs copies on CUDA streams of its own, ordered against compute in both directions."""

from queue import SimpleQueue

import torch

from kvtier.transfer.lane import Finished, ThreadLane, Transfer


class CudaLane:
    """A `ThreadLane` whose threads copy on CUDA streams, each on one of its own.

    Before the copy: the stream waits for everything that compute had enqueued when the transfer was submitted. So a
    spill reads a block after the kernels that wrote it, and a promotion overwrites a slot after the kernels that
    still read its former content.
    After the copy: the transfer counts as finished when its bytes have landed (the thread synchronises the stream, the
    owner does not wait). Blocks are published and slots handed on by `poll()` after that, so compute enqueued later
    finds a promoted block complete, and a spilled slot's next writer comes after the spill's read.

    With several threads one verifies a batch on the CPU while another one's is on the bus; transfers then finish in
    any order, which is safe since each leases both of its ends.

    The time that a transfer waited for compute does not count as the lane's: behind a long step a small copy would make
    the bus look a hundred times slower than it is, and a hit not worth loading.
    """

    def __init__(
        self, finished: Finished, name: str, device: torch.device, capacity: int = 64, num_threads: int = 1
    ) -> None:
        self._device = device
        self._unused: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
        for _ in range(num_threads):
            # Lower number, higher priority: copies are short and must not queue behind compute.
            self._unused.put(torch.cuda.Stream(device=device, priority=-1))  # type: ignore[no-untyped-call]  # untyped
        self._threads = ThreadLane(finished, name, num_threads, capacity)

    @property
    def num_pending(self) -> int:
        return self._threads.num_pending

    def submit(self, transfer: Transfer) -> bool:
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        computed.record(torch.cuda.current_stream(self._device))
        copy = transfer.work

        def ordered_copy() -> object:
            stream = self._unused.get_nowait()  # there are as many as threads
            try:
                with torch.cuda.device(self._device), torch.cuda.stream(stream):
                    asked = stream.record_event(_timed_event())
                    stream.wait_event(computed)
                    released = stream.record_event(_timed_event())
                    try:
                        return copy()
                    finally:  # also after a failure half way: what was enqueued may still be writing
                        stream.synchronize()
                        transfer.waited_s = asked.elapsed_time(released) / 1000
            finally:
                self._unused.put(stream)

        transfer.work = ordered_copy
        return self._threads.submit(transfer)

    def close(self) -> bool:
        return self._threads.close()


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
