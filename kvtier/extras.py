"""Imports of the packages that only an extra of kvtier installs, and the error for a package that is missing.

kvtier's own requirements may be imported anywhere. A package of an extra must be imported inside `extra`, or in a
module that is imported inside `extra`; `tests/package/test_extras.py` checks this.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec


class MissingExtra(ImportError):
    """A package of an extra is missing or cannot be imported. The message is one line with the command to run."""

    def __init__(self, what: str, extra_name: str, otherwise: str, package: str | None) -> None:
        """Compose the message.

        Args:
            what: The first part of the message, which says what needs which package.
            extra_name: The extra that installs the package.
            otherwise: An alternative for the user, or "".
            package: The package that cannot be imported, if known.
        """
        # This works although kvtier is on no package index: pip reads the extras from the installed package.
        self.remedy = f"pip install 'kvtier[{extra_name}]'{f', {otherwise}' if otherwise else ''}"
        super().__init__(f"{what}; {self.remedy}", name=package)


@contextmanager
def extra(name: str, needed_for: str, otherwise: str = "") -> Iterator[None]:
    """Convert an ImportError of an optional package inside the block to `MissingExtra`.

    Args:
        name: The extra that installs the package, a key of `optional-dependencies` in pyproject.toml.
        needed_for: The feature that needs the package. The message begins with it.
        otherwise: An alternative to installing the package, for example "or remove [events]".

    Raises:
        MissingExtra: A package is missing, or is too old or too new to be imported.
        ImportError: A module of kvtier itself is missing. No extra would install it.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "kvtier":
            raise
        # For a missing module its name says enough. Other errors name what is too old, so their message is kept, such
        # as "cannot import name 'X' from 'redis'".
        is_missing = isinstance(error, ModuleNotFoundError) and package
        what = f"{needed_for} needs {package}" if is_missing else f"{needed_for}: {_line(error)}"
        raise MissingExtra(what, name, otherwise, error.name) from error


def require_packages(packages: Sequence[str], name: str, needed_for: str, otherwise: str = "") -> None:
    """Raise `MissingExtra` if one of *packages* is not installed, without importing any of them.

    The other arguments are those of `extra`.
    """
    if missing := [package for package in packages if find_spec(package) is None]:
        raise MissingExtra(f"{needed_for} needs {' and '.join(missing)}", name, otherwise, missing[0])


def _line(error: ImportError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
