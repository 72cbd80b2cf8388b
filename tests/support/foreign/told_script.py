"""ToldScript: a script of this folder in the foreign environment, told what to do line by line."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foreign.install import OTHER_CLIENTS
from foreign.running import ENDS_WITHIN_S, ROOT

HERE = Path(__file__).parent


def environment(knows_kvtier: bool, before: Sequence[Path] = ()) -> dict[str, str]:
    """Return the environment of a script of this folder. It can import kvtier if it *knows_kvtier*, and finds packages
    in the folders *before* first."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found |= {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
    searched = [*before, *([ROOT] if knows_kvtier else [])]
    return found | ({"PYTHONPATH": os.pathsep.join(map(str, searched))} if searched else {})


def clients_of_lmcache(python: str) -> dict[str, list[Path]]:
    """Return the versions of LMCache beside this interpreter, and the folders that are searched first for each."""
    folder = Path(python).parents[1]
    return {"0.5.6": [], **{version: [folder / f"lmcache-{version}"] for version in OTHER_CLIENTS}}


class ToldScript:
    """The script, as an object with its functions. RuntimeError if it has ended."""

    def __init__(
        self, python: str, script: str, *arguments: str, knows_kvtier: bool = False, before: Sequence[Path] = ()
    ) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "KVTIER_SHOW_ENGINES" not in os.environ else None,
            text=True,
            env=environment(knows_kvtier, before),
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith("answer "):
                    return json.loads(line.removeprefix("answer "))
            raise RuntimeError(f"{self.process.args!r} has ended in {name}{arguments}")

        return call

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(ENDS_WITHIN_S)
