"""HostKernel: compiles a CUDA kernel's own source for the host and runs it thread by thread."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Names that CUDA defines for the source. `_LAUNCH` runs all threads of all blocks, one after the other, last ones first
# (a kernel that needs an order is wrong).
_PRELUDE = """
struct dim3 { unsigned int x, y, z; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
static dim3 gridDim, blockDim, blockIdx, threadIdx;
#define __global__
#line 1 "kernel"
"""
_LAUNCH = """
#line 1 "launch"
extern "C" void launch(unsigned int columns, unsigned int rows, unsigned int threads, %(parameters)s) {
    gridDim = {columns, rows, 1};
    blockDim = {threads, 1, 1};
    for (unsigned int y = rows; y-- > 0;)
        for (unsigned int x = columns; x-- > 0;)
            for (unsigned int thread = threads; thread-- > 0;) {
                blockIdx = {x, y, 0};
                threadIdx = {thread, 0, 0};
                %(name)s(%(arguments)s);
            }
}
"""


def host_compiler() -> str | None:
    """The path of a C++ compiler of this machine; None if it has none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


class HostKernel:
    """A kernel `extern "C" __global__ void name(...)`, with parameters of 64 bits each: pointers and numbers."""

    def __init__(self, source: str, name: str) -> None:
        """RuntimeError without a compiler, or if it refuses the source."""
        types = _parameter_types(source, name)
        self._launch = _compiled(source, name, tuple(types)).launch
        self._launch.argtypes = [ctypes.c_uint] * 3 + [ctypes.c_ulonglong] * len(types)
        self._launch.restype = None

    def __call__(self, grid: tuple[int, int], num_threads: int, arguments: Sequence[int]) -> None:
        """Run the kernel; returns when all its threads have run."""
        self._launch(*grid, num_threads, *arguments)


def _parameter_types(source: str, name: str) -> list[str]:
    """The type of each parameter, as the source writes it."""
    parameters = source.split(f"void {name}(")[1].split(")", maxsplit=1)[0].split(",")
    return [parameter.strip().rpartition(" ")[0] for parameter in parameters]


@functools.cache
def _compiled(source: str, name: str, types: tuple[str, ...]) -> ctypes.CDLL:
    compiler = host_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler here to build the kernel for the host")
    launch = _LAUNCH % {
        "name": name,
        "parameters": ", ".join(f"unsigned long long a{i}" for i in range(len(types))),
        "arguments": ", ".join(f"({each})a{i}" for i, each in enumerate(types)),
    }
    with tempfile.TemporaryDirectory(prefix="kvtier-kernel-") as folder:
        file, library = Path(folder, "kernel.cc"), Path(folder, "kernel.so")
        file.write_text(_PRELUDE + source + launch)
        command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the kernel {name} does not compile: {done.stderr}")
        return ctypes.CDLL(str(library))
