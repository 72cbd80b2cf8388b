"""CudaLane: a queue of copies with its own threads and CUDA streams, whose copies wait for earlier compute."""

from queue import SimpleQueue

import torch

from kvtier.transfer.lane import Finished, ThreadLane, Transfer


class CudaLane:
    """A `ThreadLane` (a queue of transfers with its own threads) in which each thread copies on its own CUDA stream.

    Before the copy, the stream waits for all compute that was enqueued when the transfer was submitted. So a spill (a
    copy to the host) reads a block after the kernels that wrote it, and a promotion (a copy to the device) overwrites a
    slot after the kernels that still read its former content.

    A transfer is finished when its bytes are in place. The lane's thread waits for that, and the owner's thread does
    not. The tiers publish a block or reuse a slot only after its transfer has finished. So compute enqueued later finds
    a promoted block complete, and overwrites a spilled slot only after the spill has read it.

    With several threads, one thread verifies a batch on the CPU while another thread's batch is on the bus. Transfers
    may then finish in any order, which is safe because each transfer leases its source and target slots.

    `Transfer.seconds` does not include the time that a transfer waited for compute. Otherwise a small copy behind a
    long step would make the bus look a hundred times slower than it is, and hits would not seem worth loading.
    """

    def __init__(
        self, finished: Finished, name: str, device: torch.device, capacity: int = 64, num_threads: int = 1
    ) -> None:
        self._device = device
        self._unused: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
        for _ in range(num_threads):
            # A lower number is a higher priority. Copies are short and must not queue behind compute.
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
            stream = self._unused.get_nowait()  # never empty: there is one stream per thread
            try:
                with torch.cuda.device(self._device), torch.cuda.stream(stream):
                    asked = stream.record_event(_timed_event())
                    stream.wait_event(computed)
                    released = stream.record_event(_timed_event())
                    try:
                        return copy()
                    finally:  # also after an error, because enqueued copies may still be writing
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
