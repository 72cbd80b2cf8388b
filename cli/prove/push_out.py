"""PushOut: what happens between earlier prompts and later ones, so that a colder tier answers."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.cli.prove.asker import Asker
from kvtier.cli.prove.endpoint import Refused
from kvtier.cli.prove.writing import WORDS

_STARTS_WITHIN_S = 1800.0  # a server that loads a large model
PAUSE_S = 0.5
_STDERR = 2


@dataclass(frozen=True, slots=True)
class PushOut:
    """Prompts of *num_tokens* in all are asked; then *command* is run by a shell, if there is one."""

    num_tokens: int
    command: str | None

    def run_command(self, askers: Sequence[Asker]) -> None:
        """Run the command, and return once all of *askers* answer. RuntimeError if it fails, or they do not."""
        if self.command is None:
            return
        # Its output is no part of a report.
        status = subprocess.run(self.command, shell=True, stdout=_STDERR, check=False).returncode
        if status != 0:
            raise RuntimeError(f"--between {self.command!r} ended with status {status}; it must end with 0")
        give_up_at = time.monotonic() + _STARTS_WITHIN_S
        for asker in askers:
            while (why := _why_not(asker)) is not None:
                if time.monotonic() > give_up_at:
                    raise RuntimeError(f"after --between the server does not answer: {why}")
                time.sleep(PAUSE_S)


def _why_not(asker: Asker) -> str | None:
    try:
        asker.ask(WORDS[0])
    except (OSError, Refused) as error:
        return str(error)
    return None
