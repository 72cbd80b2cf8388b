"""ResponseFormat: OpenAI's and vLLM's request parameters for the format that the answer's text must have."""

from typing import Annotated, Any, TypeAlias

import msgspec

from kvtier.engine.model.sampling import InvalidParameter
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

MAX_CHOICES_OF_TEXT = 1024


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """The `response_format` that allows any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """The `response_format` that allows any JSON object.

    *schema* works like the schema of `JsonSchemaFormat`. llama.cpp and Together have it too; OpenAI's API does not.
    """

    schema: dict[str, Any] | None = None


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object `json_schema` of OpenAI's `response_format`. *name* and *description* have no effect."""

    name: str
    schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """The `response_format` that allows JSON that follows a schema.

    Keywords of the schema that cannot be enforced are ignored, unless *strict* is true.
    """

    json_schema: NamedSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat
JsonSchema: TypeAlias = str | dict[str, Any]
Choices: TypeAlias = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES_OF_TEXT)]


class StructuredOutputsParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's parameter `structured_outputs`. Exactly one of its fields must be set."""

    json: JsonSchema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


def as_structured_outputs(
    response_format: ResponseFormat | None, asked: StructuredOutputsParam | None, guided: dict[str, Any]
) -> StructuredOutputs | None:
    """Return the format that the answer's text must have; None: any text.

    Args:
        response_format: OpenAI's parameter.
        asked: vLLM's parameter `structured_outputs`.
        guided: Values of vLLM's older parameters, such as `guided_json`, by name.

    Raises:
        InvalidParameter: Several parameters give a format, or a schema or grammar is invalid.
    """
    found = [*_of_format(response_format), *_of_vllm(asked)]
    for name, value in guided.items():
        if value is not None:
            found.append({name.removeprefix("guided_"): value, "parameter_name": name})
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(str(each["parameter_name"]) for each in found)
        raise InvalidParameter(str(found[1]["parameter_name"]), f"is one format too many; give only one of {names}")
    return StructuredOutputs(**found[0])


def _of_format(asked: ResponseFormat | None) -> list[dict[str, Any]]:
    match asked:
        case JsonObjectFormat(schema) if schema:
            return [{"json": schema, "strict": False, "parameter_name": "response_format"}]
        case JsonObjectFormat():
            return [{"json_object": True, "parameter_name": "response_format"}]
        case JsonSchemaFormat(named):
            return [{"json": named.schema, "strict": bool(named.strict), "parameter_name": "response_format"}]
    return []


def _of_vllm(asked: StructuredOutputsParam | None) -> list[dict[str, Any]]:
    return [] if asked is None else [{**msgspec.structs.asdict(asked), "parameter_name": "structured_outputs"}]
