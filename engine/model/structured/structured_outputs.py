"""StructuredOutputs: a constraint on the text of a completion."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.engine.model.sampling import InvalidParameter

MAX_CHARACTERS = 1 << 16
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on the text of a completion, like vLLM's `StructuredOutputsParams`.

    Exactly one of these five fields must be set. The text is then:

    - *json*: JSON that is valid by this schema, which is given as a mapping or as a string;
    - *json_object*: any JSON object;
    - *regex*: a text that this regular expression matches as a whole;
    - *choice*: one of these texts;
    - *grammar*: a text of this context-free grammar, in llguidance's dialect of Lark's notation or in GBNF.

    Some keywords of JSON schemas cannot be enforced. If *strict*, a schema with such a keyword is refused; otherwise
    the keyword is ignored. Error messages begin with *parameter_name*.

    Raises:
        InvalidParameter: If the value is invalid, or has more than 65,536 characters.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    strict: bool = True
    parameter_name: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            there = ", ".join(given) or "no constraint"
            raise InvalidParameter(self.parameter_name, f"has {there}; give exactly one of {', '.join(_KINDS)}")
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice(self.choice))
        for kind in ("regex", "grammar"):
            if not isinstance(getattr(self, kind), str | None):
                raise InvalidParameter(self.parameter_name, f"has a {kind} that is not a string; give a string")
        if (length := len(self.text)) > MAX_CHARACTERS:
            raise InvalidParameter(self.parameter_name, f"has {length:,} characters; send {MAX_CHARACTERS:,} at most")

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(kind for kind in _KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """Constraint as one text: the schema, the expression, the grammar, or the choices as JSON."""
        if self.kind == "json_object":
            return '{"type": "object"}'
        given = getattr(self, self.kind)
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    def _schema_text(self, schema: object) -> str:
        """Return the schema as JSON text, by which equal schemas are recognized.

        The text keeps the order of properties, because completions follow this order.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidParameter(self.parameter_name, f"has a schema that is not JSON: {error}") from None
        if not isinstance(parsed, Mapping):
            raise InvalidParameter(self.parameter_name, f"has a schema of type {type(parsed).__name__}; give an object")
        return text

    def _checked_choice(self, choice: Sequence[str]) -> tuple[str, ...]:
        if isinstance(choice, str) or not choice or not all(isinstance(text, str) and text for text in choice):
            raise InvalidParameter(
                self.parameter_name, "has a choice that is not a list of texts; give at least one text, and none empty"
            )
        return tuple(choice)
