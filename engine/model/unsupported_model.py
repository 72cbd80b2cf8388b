"""UnsupportedModel: the error for a model whose keys and values cannot be kept in kvtier's blocks."""


class UnsupportedModel(ValueError):
    """The model's attention cannot go through kvtier, or its weights have no digest; the message says why."""


class ChangedModel(RuntimeError):
    """Weights, parts, attention or mode of the model are not those that cached blocks were computed with."""
