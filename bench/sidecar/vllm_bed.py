"""A sidecar, and the real vLLM that is attached to it by configuration alone."""

import random
import time
from pathlib import Path

from foreign.running import Sidecar, Vllm, flip_disk, free_endpoint, transfer_config

PROMPT_TOKENS = 2050
CHUNK_TOKENS = 256
ATTACHING_S = 60.0  # until an engine has noticed a restart: two or three heartbeats of 2 s are usual
HOST, DISK = "512MiB", "1GiB"


class Bed:
    """A sidecar and an engine that is attached to it."""

    def __init__(
        self, python: str, model: Path, sidecar: Sidecar, endpoint: str | None = None, policy: str = "recompute"
    ) -> None:
        """The engine attaches at *endpoint*, the sidecar's own by default; *policy* is the engine's, if a load fails.
        `close` ends both."""
        self._python = python
        self._model = model
        self._transfer = transfer_config(endpoint or sidecar.endpoint, policy)
        self._prompts = random.Random(1)
        self.sidecar = sidecar
        self.engine = self._started_engine()

    def reset_engine(self) -> None:
        """Have the engine forget its own prefix cache."""
        self.engine.reset()

    def restart_engine(self) -> None:
        """End the engine at once, and start another."""
        self.engine.kill()
        self.engine = self._started_engine()

    def restart_sidecar(self) -> None:
        """End the sidecar as systemd does, start it again, and wait until the engine has noticed."""
        self.sidecar.stop()
        self.sidecar.start()
        self.wait_attached()

    def wait_attached(self) -> None:
        """Until what is stored can be loaded again: the engine learns of a restart by its heartbeats."""
        give_up_at = time.monotonic() + ATTACHING_S
        while time.monotonic() < give_up_at:
            probe = self.prompt()
            self.engine.generate([probe], 1)
            self.engine.reset()
            if self.engine.generate([probe], 1)["cached"] != [0]:
                return
            time.sleep(0.5)
        raise TimeoutError("the engine does not attach again")

    def prompt(self) -> list[int]:
        """One that is never asked again unless the caller does."""
        return [self._prompts.randrange(3, 259) for _ in range(PROMPT_TOKENS)]

    def flip_host_memory(self) -> None:
        """Damage the highest byte of a number in each 4 KiB of the segment that has been written to."""
        self.sidecar.flip_host_memory()

    def flip_disk(self, store: Path) -> None:
        """Damage the highest byte of a number in each 4 KiB on disk, and have nothing in host memory."""
        self.sidecar.stop()
        flip_disk(store)
        self.sidecar.start()
        self.wait_attached()

    def close(self) -> None:
        """End both at once."""
        self.engine.kill()
        self.sidecar.kill()

    def _started_engine(self) -> Vllm:
        return Vllm(self._python, self._model, self._transfer)


def started_sidecar(store: Path, before: str = "") -> Sidecar:
    """A sidecar with host memory and a disk; *before*: see `Sidecar`."""
    return Sidecar(free_endpoint(), "--host", HOST, "--disk", f"{store}:{DISK}", before=before)
