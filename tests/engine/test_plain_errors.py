"""msgspec's messages about wrong values, in plain words."""

from typing import Annotated, Literal

import msgspec
import pytest

from kvtier.engine.plain_errors import plain_error

At = msgspec.Meta


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Annotated[int, At(ge=0)], -1, "must be a whole number, 0 or more"),
        (Annotated[int, At(le=65535)], 70_000, "must be a whole number, 65535 or less"),
        (Annotated[float, At(gt=0)], 0.0, "must be a number, more than 0"),
        (Annotated[float, At(lt=1)], 1.5, "must be a number, less than 1"),
        (Annotated[str, At(min_length=1)], "", "must not be empty"),
        (Annotated[str, At(max_length=2)], "abc", "must have at most 2 characters"),
        (Annotated[list[int], At(min_length=3)], [], "must have at least 3 items"),
        (int, "1", "must be a whole number, not a text"),
        (int | str | None, [], "must be a whole number or a text, not a list"),
        (dict[str, int], None, "must be an object, not null"),
        (bool, {}, "must be true or false, not an object"),
        (Literal["a"], "b", "Invalid enum value 'b'"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(kind: object, value: object, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(value, kind)

    assert plain_error(str(error.value), table="an object") == said
