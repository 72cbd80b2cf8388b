"""LMDB environments that give up when they are told to, as LMDB does that could not write its root."""

from typing import Any

import lmdb


class PanickingEnvironment:
    """An environment in which, once it has given up, nothing begins any more."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self.has_given_up = False

    def begin(self, *arguments: Any, **named: Any) -> Any:
        if self.has_given_up:
            raise lmdb.PanicError("mdb_txn_begin: MDB_PANIC: Update of meta page failed or environment had fatal error")
        return self._env.begin(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class PanickingLmdb:
    """Opens environments in place of `lmdb.open`, and keeps them: the one in use is the last."""

    def __init__(self) -> None:
        self._open = lmdb.open
        self.opened: list[PanickingEnvironment] = []

    def open(self, *arguments: Any, **named: Any) -> PanickingEnvironment:
        self.opened.append(PanickingEnvironment(self._open(*arguments, **named)))
        return self.opened[-1]

    def give_up(self) -> None:
        """The environment in use gives up."""
        self.opened[-1].has_given_up = True
