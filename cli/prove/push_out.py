"""Eviction of cached prompts from the fast tiers, so that later prompts are served by a lower tier."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.cli.prove.dialect import ModelClient
from kvtier.cli.prove.endpoint import Refused
from kvtier.cli.prove.writing import WORDS

_STARTS_WITHIN_S = 1800.0  # time limit for a server's start, which may load a large model
PAUSE_S = 0.5
_STDERR = 2


@dataclass(frozen=True, slots=True)
class EvictionStep:
    """A step that makes the server evict cached blocks, so that later prompts with the same prefix test a lower tier.

    First, other prompts of *num_tokens* tokens in total are sent. Then the shell command *command* is run, if not None.
    """

    num_tokens: int
    command: str | None

    def run_command(self, askers: Sequence[ModelClient]) -> None:
        """Run the command, and wait until the server answers requests for the models of all *askers*.

        Raises RuntimeError if the command fails, or if the server does not answer in time.
        """
        if self.command is None:
            return
        # The command's stdout goes to stderr, because stdout is for the report.
        status = subprocess.run(self.command, shell=True, stdout=_STDERR, check=False).returncode
        if status != 0:
            raise RuntimeError(f"--between {self.command!r} ended with status {status}; it must end with 0")
        give_up_at = time.monotonic() + _STARTS_WITHIN_S
        for asker in askers:
            while (why := _why_not(asker)) is not None:
                if time.monotonic() > give_up_at:
                    raise RuntimeError(f"the command of --between ended, but the server does not answer: {why}")
                time.sleep(PAUSE_S)


def _why_not(asker: ModelClient) -> str | None:
    try:
        asker.ask(WORDS[0])
    except (OSError, Refused) as error:
        return str(error)
    return None
