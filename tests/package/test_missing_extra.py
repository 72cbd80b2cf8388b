"""What a user reads where a package of an extra is missing."""

import json

import pytest

from kvtier.extras import MissingExtra, extra, require_packages


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_package.part", "it needs no_such_package; pip install 'kvtier[redis]', or do without"),
        ("from json import no_such_name", "it: cannot import name 'no_such_name' from 'json' (FILE); pip install"),
    ],
)
def test_an_import_that_fails_is_one_line_that_names_the_extra(code: str, message: str) -> None:
    with pytest.raises(MissingExtra) as raised, extra("redis", "it", "or do without"):
        exec(code)

    assert str(raised.value).startswith(message.replace("FILE", json.__file__))
    assert "\n" not in str(raised.value)


def test_a_module_of_kvtiers_own_that_is_missing_is_no_matter_of_extras() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'kvtier\.no_such_module'$"), extra("redis", "it"):
        exec("import kvtier.no_such_module")


def test_the_innermost_extra_is_the_one_that_is_missing() -> None:
    message = r"^a remote needs no_such_package; pip install 'kvtier\[redis\]'$"

    with pytest.raises(MissingExtra, match=message), extra("serve", "a server"), extra("redis", "a remote"):
        exec("import no_such_package")


def test_packages_are_asked_for_without_importing_them() -> None:
    require_packages(["sqlite3"], "real", "a file")
    with pytest.raises(MissingExtra, match=r"^a file needs no_a and no_b; pip install 'kvtier\[real\]'$"):
        require_packages(["no_a", "sqlite3", "no_b"], "real", "a file")
