"""What texts have to be, in llguidance's notation, and what its parsers may spend on it."""

import json
from typing import TYPE_CHECKING

from kvtier.engine.model.sampling import WrongParameter
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

if TYPE_CHECKING:  # an optional package
    from llguidance import LLParserLimits

# Between the parts of JSON, enough for a deep indentation. Without a limit a model may write blanks for ever.
WHITESPACE = r"[ \n\r\t]{0,32}"


def limits() -> "LLParserLimits":
    """What compiling and one step may spend.

    With llguidance's defaults an ambiguous grammar took 2.8 s for a step over 152,000 tokens, with these 0.08 s before
    it failed. Objects with 400 optional properties stay within them.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000,  # of 1 to 2 KiB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def notation(asked: StructuredOutputs) -> str:
    """What is *asked* in llguidance's notation. `WrongParameter` for a grammar in GBNF with mistakes."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    match asked.kind:
        case "regex":  # digits are 0 to 9, and not those of all scripts
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(asked.text, 'd')}/")
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in asked.choice or ()]
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        case "grammar":
            try:
                return grammar_from("grammar", asked.text)
            except ValueError as error:
                raise WrongParameter(asked.asked_as, f"cannot be used: {error}") from None
    is_lenient = not asked.strict
    return LLMatcher.grammar_from_json_schema(
        asked.text, overrides={"whitespace_pattern": WHITESPACE, "lenient": is_lenient, "coerce_one_of": is_lenient}
    )
