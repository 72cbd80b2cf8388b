"""A real Prometheus, Debian's, in a process of its own on loopback; it scrapes each second."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from plain_http import NO_TLS
from waiting import DEADLINE_S, wait_for

SCRAPE_S = 1
_LISTENING = re.compile(r'msg="Listening on" address=127\.0\.0\.1:(\d+)')


@dataclass(frozen=True)
class Target:
    """Where metrics are, on this machine; *token* is what `Authorization: Bearer` needs, if it needs anything."""

    port: int
    token: str = ""


@dataclass(frozen=True)
class Series:
    """One line of an answer: its labels, and its values over time."""

    labels: Mapping[str, str]
    values: Sequence[float]


@dataclass(frozen=True)
class Prometheus:
    """A server that runs and has scraped since *began_at*."""

    port: int
    began_at: float

    def ask(self, path: str, **parameters: str | float) -> object:
        """The data of an answer of the API; AssertionError, with what it said, if it is none."""
        answer = httpx.get(
            f"http://127.0.0.1:{self.port}/api/v1/{path}", params=parameters, timeout=DEADLINE_S, verify=NO_TLS
        )
        said = answer.json()
        assert said["status"] == "success", f"{parameters}: {said['error']}"
        return said["data"]

    def over_time(self, expression: str, since: float, until: float) -> list[Series]:
        """What the expression was at each scrape from *since* until *until*, in seconds since the Unix epoch."""
        found = self.ask("query_range", query=expression, start=since, end=until, step=SCRAPE_S)
        return [
            Series(each["metric"], [float(value) for _, value in each["values"]])
            for each in found["result"]  # type: ignore[index]  # JSON
        ]

    def values_of(self, label: str, series: str) -> list[str]:
        """The values that the label has in the series that match."""
        found = self.ask(f"label/{quote(label)}/values", **{"match[]": series})
        return [str(value) for value in found]  # type: ignore[attr-defined]  # JSON

    def num_scraped(self) -> dict[str, int]:
        """By job, how many scrapes have come back with metrics."""
        found = self.over_time("up == 1", self.began_at, time.time())
        return {each.labels["job"]: len(each.values) for each in found}


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, Target], rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """A server that has scraped each job of *targets* and evaluates *rules*. Without one the test is skipped."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(
        json.dumps(  # which is YAML too
            {
                "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
                "rule_files": [str(path) for path in rules],
                "scrape_configs": [
                    {
                        "job_name": job,
                        "static_configs": [{"targets": [f"127.0.0.1:{target.port}"]}],
                        **({"authorization": {"credentials": target.token}} if target.token else {}),
                    }
                    for job, target in targets.items()
                ],
            }
        )
    )
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command.append("--web.listen-address=127.0.0.1:0")
    began_at = time.time()
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_for(lambda: process.poll() is not None or _LISTENING.search(log.read_text()) is not None)
            listening = _LISTENING.search(log.read_text())
            assert listening is not None, log.read_text()
            server = Prometheus(int(listening[1]), began_at)
            wait_for(
                lambda: httpx.get(f"http://127.0.0.1:{server.port}/-/ready", timeout=DEADLINE_S).status_code == 200
            )
            wait_for(lambda: set(server.num_scraped()) == set(targets))
            yield server
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
