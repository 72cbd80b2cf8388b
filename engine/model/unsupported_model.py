"""Errors for a model that cannot use kvtier's blocks, or that was changed while it used them."""


class UnsupportedModel(ValueError):
    """An error for a model whose attention cannot use kvtier, or whose weights have no digest. The message says why."""


class ChangedModel(RuntimeError):
    """An error for a model whose weights, parts, attention or mode differ from those that computed cached blocks."""
