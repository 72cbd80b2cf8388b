"""Makes a virtual environment with SGLang's own classes of host memory and storage: install_sglang.py FOLDER.

Wheels only; a minute or two, 360 MB. SGLang requires CUDA, so its wheel is installed without what it requires, and then
what its modules `mem_cache` and `managers.cache_controller` import. What kvtier requires too (torch, transformers,
numpy ...) is taken from the environment that runs this. There is no torchvision for its torch on a CPU: see
`bare_sglang.py`.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

SGLANG = "sglang==0.5.23"
IMPORTED = ["aiohttp", "dill", "ipython", "loguru", "orjson", "pillow", "pybase64", "sentencepiece"]
WITHOUT_REQUIREMENTS = ["apache-tvm-ffi==0.1.11", "compressed-tensors"]
HERE = Path(__file__).parent


def main(folder: Path) -> None:
    """Make the environment in *folder*."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    own = sysconfig.get_path("purelib")
    (packages / "kvtier.pth").write_text(f"import site; site.addsitedir({own!r})\n")

    def install(*names: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-q", *names], check=True)

    install(*IMPORTED)
    install("--no-deps", SGLANG, *WITHOUT_REQUIREMENTS)
    subprocess.run([python, "-c", "import bare_sglang"], check=True, cwd=HERE)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
