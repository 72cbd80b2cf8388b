"""UnsupportedModel: the error for a model whose keys and values cannot be kept in kvtier's blocks."""


class UnsupportedModel(ValueError):
    """The model's attention cannot go through kvtier, or its weights have no digest; the message says why."""
