"""Salts: values of `cache_salt` that no request has had."""


class Salts:
    """Makes them; *run* is this run's alone."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._num_made = 0

    def new(self) -> str:
        """One more, of characters that every connector takes."""
        self._num_made += 1
        return f"kvtier-prove-{self._run}-{self._num_made}"
