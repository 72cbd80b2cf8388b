"""The age of a process counts from its start, and so does what `kvtier serve` says of its own."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from serving import serving, tables
from small_models import build

from kvtier.server.serving_app import process_age_s

SCRIPT = """
import time
began = time.monotonic()
from kvtier.server.serving_app import process_age_s
since_began, age, more = time.monotonic() - began, process_age_s(), process_age_s()
print(since_began <= age <= more)
"""


def test_it_counts_what_came_before_this_module_was_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)

    assert done.stdout == "True\n"


@pytest.mark.parametrize("content", [None, "", "7 (a b) S 1 2", "7 (x) S" + " y" * 30])
def test_without_proc_it_counts_from_the_import(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)

    assert 0 <= process_age_s(tmp_path / "stat") <= process_age_s() + 0.02  # a clock tick


def test_a_server_says_how_long_it_took_from_its_processs_start(caplog: pytest.LogCaptureFixture) -> None:
    before = process_age_s()

    with caplog.at_level(logging.INFO, "kvtier"), serving(build("llama"), tables()):
        pass

    (ready,) = [record for record in caplog.records if record.getMessage() == "ready"]
    assert ready.fields["seconds"] >= round(before, 1)
