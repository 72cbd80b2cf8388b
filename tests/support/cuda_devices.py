"""CUDA devices that tests run on: the real one where there is one, and everywhere a fake one that runs things late."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from fake_cuda import FakeDevice, Late, Schedule, Seeded, installed
from fake_cuda.host_kernel import host_compiler

from kvtier.transfer.cuda import copies, copy_choice

LONG_KERNEL_CYCLES = 500_000_000  # about a quarter of a second on the GPUs of today
# On a fake: there is nothing to measure, and a copy of a few blocks shall take its staging buffers by turns.
TRIAL_BYTES = 1 << 16
STAGING_BYTES = 3 * 5003
GPU_0 = torch.device("cuda", 0)


@dataclass(frozen=True)
class CudaDevice:
    """Device 0: a GPU, or *fake*."""

    fake: FakeDevice | None = None

    def delay(self) -> None:
        """Keep the calling thread's current stream busy. A fake one is, until somebody waits for it."""
        torch.cuda._sleep(LONG_KERNEL_CYCLES)

    def time_passes(self) -> AbstractContextManager[None]:
        """To be entered while the test waits for what a lane's thread does: a fake device stands still else."""
        return nullcontext() if self.fake is None else self.fake.time_passes()


@dataclass(frozen=True)
class CudaKind:
    """What a test is parametrized with: *schedule* is a fake device's; without one it is a GPU."""

    name: str
    schedule: Schedule | None = None

    @contextmanager
    def opened(self) -> Iterator[CudaDevice]:
        """The device. At the end of a fake one everything that was done wrong is an error."""
        if self.schedule is None:
            yield CudaDevice()
            return
        print(f"fake CUDA: {self.schedule}")
        with pytest.MonkeyPatch.context() as patch, installed(self.schedule) as fake:
            patch.setattr(copy_choice, "TRIAL_BYTES", TRIAL_BYTES)
            patch.setattr(copies, "STAGING_BYTES", STAGING_BYTES)
            yield CudaDevice(fake)

    def marks(self, way: str | None = None) -> list[pytest.MarkDecorator]:
        """Those of a test on this device that copies in that way."""
        if self.schedule is None:
            return [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
        marks = [] if isinstance(self.schedule, Late) else [pytest.mark.long]
        if way == "kernel":
            marks.append(pytest.mark.skipif(host_compiler() is None, reason="needs a C++ compiler for the copy kernel"))
        return marks


FAKES = [CudaKind(f"fake-{schedule}", schedule) for schedule in (Late(), Seeded(1))]
CUDA_KINDS = [CudaKind("cuda"), *FAKES]
EVERY_CUDA = [pytest.param(kind, id=kind.name, marks=kind.marks()) for kind in CUDA_KINDS]
EVERY_FAKE = [pytest.param(kind, id=kind.name, marks=kind.marks()) for kind in FAKES]
