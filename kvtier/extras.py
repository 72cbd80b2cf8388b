"""Packages that only an extra of kvtier installs, and the message for one that is missing.

kvtier's own requirements are imported anywhere. A package of an extra is imported inside `extra`, or in a module that
is imported inside `extra`; `tests/package/test_extras.py` proves it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec


class MissingExtra(ImportError):
    """A package of an extra is missing or cannot be imported. The message is one line with the command to run."""

    def __init__(self, what: str, extra_name: str, otherwise: str, package: str | None) -> None:
        """Compose the message.

        Args:
            what: The first part of the message: what needs which package.
            extra_name: The extra that installs the package.
            otherwise: What else the user can do, or "".
            package: The package that cannot be imported, if it is known.
        """
        # pip takes kvtier's requirements from what is installed, so this works although kvtier is on no package index.
        self.remedy = f"pip install 'kvtier[{extra_name}]'{f', {otherwise}' if otherwise else ''}"
        super().__init__(f"{what}; {self.remedy}", name=package)


@contextmanager
def extra(name: str, needed_for: str, otherwise: str = "") -> Iterator[None]:
    """Turn an ImportError of an optional package inside the block into `MissingExtra`.

    Args:
        name: The extra that installs the package, a key of `optional-dependencies` in pyproject.toml.
        needed_for: What needs the package; the message begins with it.
        otherwise: What the user can do instead of installing it, for example "or remove [events]".

    Raises:
        MissingExtra: A package is missing, or too old or too new to be imported.
        ImportError: A module of kvtier's own is missing: no extra would install it.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "kvtier":
            raise
        # "No module named 'redis'" needs no more words; "cannot import name 'X' from 'redis'" says what is too old.
        is_missing = isinstance(error, ModuleNotFoundError) and package
        what = f"{needed_for} needs {package}" if is_missing else f"{needed_for}: {_line(error)}"
        raise MissingExtra(what, name, otherwise, error.name) from error


def require_packages(packages: Sequence[str], name: str, needed_for: str, otherwise: str = "") -> None:
    """Raise `MissingExtra` if one of *packages* is not installed. Imports none of them. The rest is as in `extra`."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise MissingExtra(f"{needed_for} needs {' and '.join(missing)}", name, otherwise, missing[0])


def _line(error: ImportError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
