"""CI and the hooks before a commit run the commands that contributors run by hand."""

import re
import shlex
from typing import Any

import yaml
from package_builds import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_workflow_runs_make_targets_and_those_of_a_merge_among_them() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]

    merge = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert merge == ["make check", "make test-all", "make docs"]
    assert set(merge) <= set(commands)
    for command in commands:
        make, target = command.split()
        assert make == "make"
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_the_hooks_before_a_commit_are_the_commands_of_make_check_and_need_no_network() -> None:
    repositories = read(".pre-commit-config.yaml")["repos"]
    hooks = [shlex.split(hook["entry"])[:2] for repository in repositories for hook in repository["hooks"]]
    checked = re.search(r"^check:[^\n]*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)

    assert checked is not None
    commands = [shlex.split(line.replace("$(BIN)", ".venv/bin"))[:2] for line in checked[1].splitlines()]
    assert hooks == commands
    assert [repository["repo"] for repository in repositories] == ["local"]
