"""Translation of structured outputs into grammars for llguidance, and limits on the cost of these grammars."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.engine.model.sampling import InvalidParameter
from kvtier.engine.model.structured.exact_integers import ExactIntegers, NotExact
from kvtier.engine.model.structured.schema_keywords import (
    drop_inexact,
    drop_nulls,
    drop_what_fails,
    has_inexact,
    schemas_in,
    warned_of,
)
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

if TYPE_CHECKING:  # an optional package
    from llguidance import LLParserLimits

# Whitespace between the parts of JSON, enough for a deep indentation. Without a limit, a model might write whitespace
# until it runs out of tokens.
WHITESPACE = r"[ \n\r\t]{0,32}"
_EMBEDDED = re.compile(r"%json\s*\{")  # a schema in a grammar of Lark's notation


def limits() -> "LLParserLimits":
    """Return the limits on the cost of compiling a grammar, and of computing the allowed tokens of one step.

    With llguidance's defaults an ambiguous grammar took 2.8 s for a step over 152,000 tokens; with these limits it
    fails after 0.08 s. Objects with 400 optional properties stay within the limits.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000,  # 1 to 2 KiB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True)
class Notation:
    """A constraint, translated into a grammar for llguidance. *text* is the grammar's text.

    *left_out* are the keywords of the constraint's JSON schemas that the grammar does not enforce.
    """

    text: str
    left_out: Sequence[str] = ()


def notation(asked: StructuredOutputs) -> Notation:
    """Translate the constraint *asked* into llguidance's notation.

    All keywords of a strict schema are enforced. Keywords of other schemas are dropped if they cannot be enforced.

    Raises:
        InvalidParameter: If a grammar in GBNF is invalid, or a strict schema has a keyword that cannot be enforced.
    """
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    match asked.kind:
        case "regex":  # \d matches 0 to 9 only, not the digits of all scripts
            return Notation(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(asked.text, 'd')}/"))
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in asked.choice or ()]
            return Notation(LLMatcher.grammar_from_lark("start: " + " | ".join(texts)))
        case "grammar":
            schemas = _Schemas(asked)
            try:
                return Notation(grammar_from("grammar", schemas.rewritten(asked.text)), schemas.left_out)
            except ValueError as error:
                raise InvalidParameter(asked.parameter_name, f"cannot be used: {error}") from None
    options = {"whitespace_pattern": WHITESPACE, "lenient": not asked.strict, "coerce_one_of": not asked.strict}
    schemas = _Schemas(asked)
    schema = json.loads(asked.text)
    rules = schemas.rules(schema, options, "start", f"{asked.parameter_name}.")
    if rules:
        return Notation(LLMatcher.grammar_from_lark("\n".join(rules)), schemas.left_out)
    return Notation(_schema_grammar(schema, options), schemas.left_out)


def _schema_grammar(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options}))


class _Schemas:
    """A rewriter of one request's schemas for llguidance, which records the keywords that it drops."""

    def __init__(self, asked: StructuredOutputs) -> None:
        self._asked = asked
        self.left_out: list[str] = []

    def rewritten(self, grammar: str) -> str:
        """Return *grammar*, which is in Lark's notation, with each embedded JSON schema rewritten for llguidance."""
        parts: list[str] = []
        rules: list[str] = []
        place = 0
        for found in _EMBEDDED.finditer(grammar):
            if found.end() - 1 < place:
                continue
            try:
                schema, end = json.JSONDecoder().raw_decode(grammar, found.end() - 1)
            except ValueError:
                continue
            options = schema.pop("x-guidance", {})
            prefix = f"exact_{len(parts)}"
            more = self.rules(schema, options, prefix, schema.pop("$comment", ""))
            rules += more
            whole = {**schema, "x-guidance": options} if options else schema
            text = prefix if more else f"%json {json.dumps(whole, ensure_ascii=False)}"
            parts += [grammar[place : found.start()], text]
            place = end
        return "\n".join(["".join([*parts, grammar[place:]]), *rules])

    def rules(self, schema: dict[str, Any], options: Mapping[str, Any], name: str, where: str) -> list[str]:
        """Return grammar rules for a schema with integers that llguidance would round.

        Return an empty list if no rules are needed or possible. Then llguidance compiles the schema, so this method
        removes the keywords that llguidance cannot enforce from *schema*. *name* is the name of the first rule. *where*
        is the schema's path, for messages about its keywords.

        Raises:
            InvalidParameter: If a keyword of a strict schema cannot be enforced.
        """
        drop_nulls(schema)
        left_out: list[str] = []
        if any(has_inexact(each) for _, each in schemas_in(schema)):
            try:
                return ExactIntegers(schema, options, name).rules
            except (NotExact, AttributeError, TypeError):  # the last two: not a valid schema, which llguidance reports
                left_out += drop_inexact(schema)
        is_strict = not options.get("lenient")
        lenient = {**options, "lenient": True, "coerce_one_of": True}
        said = self._said(schema, lenient)
        if said.is_error:
            left_out += drop_what_fails(schema, lambda each: not self._said(each, lenient).is_not_written)
            said = self._said(schema, lenient) if left_out else said
        if not said.is_error:
            left_out += warned_of(schema, said.messages)
        if left_out and is_strict:
            what = ", ".join(where + each for each in left_out)
            raise InvalidParameter(
                self._asked.parameter_name, f"cannot enforce {what}; leave it out, or set strict to false"
            )
        self.left_out += [where + each for each in left_out]
        return []

    def _said(self, schema: Mapping[str, Any], options: Mapping[str, Any]) -> "_Said":
        from llguidance import LLMatcher

        grammar = _schema_grammar(schema, options)
        return _Said(*LLMatcher.validate_grammar_with_warnings(grammar, limits=limits()))


@dataclass(frozen=True, slots=True)
class _Said:
    """llguidance's verdict on a schema: an error, or warnings."""

    is_error: bool
    messages: Sequence[str]

    @property
    def is_not_written(self) -> bool:
        # An unsatisfiable schema is the client's mistake. Any other error means that llguidance does not support it.
        return self.is_error and not any("Unsatisfiable" in text for text in self.messages)
