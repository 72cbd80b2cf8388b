"""without_nulls: clients write null for fields that they leave out, at any depth; those count as absent."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from msgspec import inspect


def without_nulls(content: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return a JSON object without the nulls in fields of *kind*, and of structs within it, that may be absent.

    What a struct does not describe, such as a JSON schema or variables of a template, stays as it is.
    """
    pruned = _pruned(content, _type_info(kind))
    assert isinstance(pruned, dict), "an object stays one"
    return pruned


@cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _pruned(value: object, kind: inspect.Type) -> object:
    match kind:
        case inspect.Metadata():
            return _pruned(value, kind.type)
        case inspect.UnionType():
            return _pruned(value, _member(value, kind.types))
        case inspect.StructType() if isinstance(value, Mapping):
            return _pruned_object(value, kind)
        case inspect.ListType() if isinstance(value, list):
            return [_pruned(each, kind.item_type) for each in value]
    return value


def _pruned_object(value: Mapping[str, Any], kind: inspect.StructType) -> dict[str, Any]:
    fields = {each.encode_name: each for each in kind.fields}
    return {
        name: _pruned(each, fields[name].type) if name in fields else each
        for name, each in value.items()
        if each is not None or name not in fields or fields[name].required
    }


def _member(value: object, types: Sequence[inspect.Type]) -> inspect.Type:
    """Return the type of a union that a value is of, as far as nulls within it are concerned."""
    if isinstance(value, list):
        return next((each for each in types if isinstance(each, inspect.ListType)), inspect.AnyType())
    structs = [each for each in types if isinstance(each, inspect.StructType)] if isinstance(value, Mapping) else []
    if len(structs) == 1:
        return structs[0]
    return next((each for each in structs if _is_tagged(value, each)), inspect.AnyType())


def _is_tagged(value: object, kind: inspect.StructType) -> bool:
    return isinstance(value, Mapping) and kind.tag_field is not None and value.get(kind.tag_field) == kind.tag
