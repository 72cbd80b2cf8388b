"""ListedModel: a model as `/v1/models` lists it."""

from dataclasses import dataclass

from kvtier.cli.prove.endpoint import Endpoint, Refused


@dataclass(frozen=True, slots=True)
class ListedModel:
    """*parent* is the model that an adapter belongs to, in the words of vLLM and kvtier; None: it is a model itself."""

    name: str
    parent: str | None
    max_tokens: int | None  # of a prompt and its answer; None: not told


def list_models(endpoint: Endpoint) -> list[ListedModel]:
    """The models of a server; none if it lists none. OSError if no server answers."""
    try:
        data = endpoint.get("/v1/models")["data"]
        return [ListedModel(each["id"], each.get("parent"), each.get("max_model_len")) for each in data]
    except (Refused, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Refused) and error.status in (401, 403):
            raise
        return []
