"""ServedModels: the model names that requests may use, and the routes `/v1/models`."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.server.answers import ModelList, ModelObject
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.paths import MODELS


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The names of the served model and of its LoRA adapters. They are known before the model is loaded."""

    name: str  # of the model itself
    adapters: Sequence[str]
    created: int  # seconds since 1970
    longest_request: int | None  # maximum tokens of a prompt and its continuation; None: the model is not loaded yet

    def lora_of(self, model: str) -> str | None:
        """Return *model* if it is the name of an adapter, or None if it is the served model's name.

        Raises ApiError 404 for any other name.
        """
        if model == self.name:
            return None
        if model in self.adapters:
            return model
        there = ", ".join([self.name, *self.adapters])
        raise ApiError(
            404, f"the server has no model of that name; use one of {there}", code="model_not_found", param="model"
        )

    def routes(self) -> list[Route]:
        """Return the routes `/v1/models` and `/v1/models/{model}`."""
        return [Route(MODELS, self._list), Route(f"{MODELS}/{{model:path}}", self._one)]

    async def _list(self, _: Request) -> Response:
        data = [self._object(name) for name in (self.name, *self.adapters)]
        return json_response(ModelList(object="list", data=data))

    async def _one(self, request: Request) -> Response:
        return json_response(self._object(request.path_params["model"]))

    def _object(self, name: str) -> ModelObject:
        return ModelObject(
            id=name,
            object="model",
            created=self.created,
            owned_by="kvtier",
            max_model_len=self.longest_request,  # vLLM's field, like the next one
            parent=None if self.lora_of(name) is None else self.name,
        )
