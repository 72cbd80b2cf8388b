"""CudaLane: copies on a CUDA stream of their own, ordered against compute in both directions."""

import torch

from kvtier.transfer.lane import Finished, ThreadLane, Transfer


class CudaLane:
    """A `ThreadLane` whose thread works on its own CUDA stream.

    Before the copy: the stream waits for everything that compute had enqueued when the transfer was submitted. So a
    spill reads a block after the kernels that wrote it, and a promotion overwrites a slot after the kernels that
    still read its former content.
    After the copy: the transfer counts as finished when its bytes have landed (the thread synchronises the stream, the
    owner does not wait). Blocks are published and slots handed on by `poll()` after that, so compute enqueued later
    finds a promoted block complete, and a spilled slot's next writer comes after the spill's read.
    """

    def __init__(self, finished: Finished, name: str, device: torch.device, capacity: int = 64) -> None:
        self._device = device
        # Lower number, higher priority: copies are short and must not queue behind compute.
        self._stream = torch.cuda.Stream(device=device, priority=-1)  # type: ignore[no-untyped-call]  # untyped in torch
        self._threads = ThreadLane(finished, name, num_threads=1, capacity=capacity)

    @property
    def num_pending(self) -> int:
        return self._threads.num_pending

    def submit(self, transfer: Transfer) -> bool:
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        computed.record(torch.cuda.current_stream(self._device))
        copy = transfer.work

        def ordered_copy() -> object:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(computed)
                try:
                    return copy()
                finally:  # also after a failure half way: what was enqueued may still be writing
                    self._stream.synchronize()

        transfer.work = ordered_copy
        return self._threads.submit(transfer)

    def close(self) -> bool:
        return self._threads.close()
