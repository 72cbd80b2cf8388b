"""Who operators are, and the log of what they asked for."""

import json
import logging
from pathlib import Path

import pytest

from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import NUM_KEPT, AuditLog
from kvtier.web.operating.operators import Operators

TOKEN = "op-token-3333"


def test_tokens_come_from_a_file_or_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "operators.toml"
    file.write_text(f'[keys]\n"{TOKEN}" = "olga"\n')
    file.chmod(0o600)

    of_file, of_environment = Operators.of(str(file), {}), Operators.of(None, {"KVTIER_OPERATOR_TOKEN": TOKEN})

    assert of_file is not None
    assert of_file.name_of(f"Bearer {TOKEN}") == "olga"
    assert of_file.name_of("Bearer another") is None
    assert of_file.name_of("") is None
    assert of_environment is not None
    assert of_environment.name_of(f"bearer {TOKEN}") == "operator"
    assert Operators.of(None, {}) is None


@pytest.mark.parametrize(
    ("environment", "what"),
    [({"KVTIER_OPERATOR_TOKEN": "short"}, "KVTIER_OPERATOR_TOKEN: a key is shorter"), ({}, "operators' tokens")],
)
def test_tokens_that_cannot_be_used_are_refused(tmp_path: Path, environment: dict[str, str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Operators.of(None if environment else str(tmp_path / "none.toml"), environment)


def test_both_a_file_and_the_environment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        Operators.of(str(tmp_path / "operators.toml"), {"KVTIER_OPERATOR_TOKEN": TOKEN})


def test_an_operators_token_must_be_no_api_key() -> None:
    operators = Operators(ApiKeys({TOKEN: "olga"}))

    operators.refuse_keys_of(ApiKeys({"another-key": "ann"}))
    with pytest.raises(ValueError, match="is an API key too"):
        operators.refuse_keys_of(ApiKeys({TOKEN: "ann"}))


def test_a_full_audit_file_is_renamed_and_a_few_are_kept(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path / "audit.jsonl"), 300, clock=lambda: 0.0)

    for number in range(40):
        audit.write("olga", "evict", {"number": number}, {"status": 200, "percent": "100%"})
    audit.close()

    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit.jsonl", *(f"audit.jsonl.{number}" for number in range(1, NUM_KEPT + 1))]
    last = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[-1])
    assert last == {
        "time": "1970-01-01T00:00:00.000Z",
        "who": "olga",
        "verb": "evict",
        "arguments": {"number": 39},
        "outcome": {"status": 200, "percent": "100%"},
    }


def test_without_a_file_the_lines_are_in_the_log_whatever_its_level(caplog: pytest.LogCaptureFixture) -> None:
    parent = logging.getLogger("kvtier")
    before = parent.level
    parent.setLevel(logging.ERROR)
    try:
        AuditLog().write(None, "reset", {}, {"status": 401})
    finally:
        parent.setLevel(before)

    (record,) = [record for record in caplog.records if record.name == "kvtier.audit"]
    assert record.fields == {"who": None, "verb": "reset", "arguments": {}, "outcome": {"status": 401}}


def test_an_audit_file_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="give a file that can be written to"):
        AuditLog(str(tmp_path / "no folder" / "audit.jsonl"))
