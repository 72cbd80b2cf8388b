"""A process that serves a sidecar as `kvtier sidecar` does, at an endpoint that gets stuck once a file is there:
`python served_sidecar.py CONFIG FILE`."""

import sys
import threading
from pathlib import Path

from sidecars import OpenEndpoint

from kvtier.sidecar.config import sidecar_config
from kvtier.sidecar.process import serve_engines
from kvtier.web.log_lines import write_log


class StickingEndpoint(OpenEndpoint):
    """Waits without end in the owner's thread, once *file* is there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def tick(self) -> None:
        if self._file.exists():
            threading.Event().wait()


if __name__ == "__main__":
    write_log("human")
    sys.exit(serve_engines(sidecar_config(sys.argv[1], {}), lambda _: lambda *_: [StickingEndpoint(Path(sys.argv[2]))]))
