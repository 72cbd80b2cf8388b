"""ChangedModel: the error for a model that was changed while kvtier computes with it."""


class ChangedModel(RuntimeError):
    """Weights, parts, attention or mode of the model are not those that cached blocks were computed with."""
