"""A trial: what would cost too much, or end the process, is refused in a word; ordinary schemas pass."""

import pytest

from kvtier.engine.model.sampling import InvalidParameter
from kvtier.engine.model.structured.structured_outputs import MAX_CHARACTERS, StructuredOutputs
from kvtier.engine.model.structured.trial import run_trial

# What each did in a process without bounds stands beside it.
CRASHING = {
    "a chain of rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'},
    "a chain of schemas": {
        "json": {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1500)}}
    },
}
ENDLESS = {
    "patterns all at once": {"json": {"allOf": [{"pattern": f"a{i}b"} for i in range(700)]}},  # more than a minute
    "multiples": {"json": {"anyOf": [{"multipleOf": 2 * i + 999} for i in range(700)]}},  # more than a minute
}
COSTLY = {
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s s | s s | "a"'},  # 2.8 s for a token of 152,000
    "a long repetition": {"regex": "a{100000}"},  # 0.1 s for each token
    "repetitions of repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "exponential": {"regex": "(a?){2000}a{2000}"},
    "many optional properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}},
}
WRONG = {
    "no schema": ({"json": {"type": "nothing"}}, "cannot be used"),
    "deeply nested": ({"json": '{"items":' * 200 + "{}" + "}" * 200}, "recursion limit"),
    "impossible": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    "a schema elsewhere": ({"json": {"$ref": "http://127.0.0.1:9/schema.json"}}, "not present"),
    "a keyword that cannot be enforced": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "a loop": ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text at all"),
    "no expression": ({"regex": "("}, "cannot be used"),
    "an expression that looks back": ({"regex": r"(a)\1"}, "backreferences"),
    "an expression of nothing": ({"regex": ""}, "no text at all"),
    "a grammar without a start": ({"grammar": "x: y"}, "cannot be used"),
}


def refusal(given: dict[str, object]) -> str:
    with pytest.raises(InvalidParameter, match=r"^guided ") as wrong:
        run_trial(StructuredOutputs(**given, parameter_name="guided"))
    assert "\n" not in str(wrong.value)
    assert len(str(wrong.value)) < 400
    return str(wrong.value)


@pytest.mark.parametrize("name", CRASHING)
def test_what_would_end_the_process_is_refused(name: str) -> None:
    assert "too much time or memory" in refusal(CRASHING[name])


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.long
def test_what_would_compile_for_ever_is_refused(name: str) -> None:
    assert "too much time or memory" in refusal(ENDLESS[name])


@pytest.mark.parametrize("name", COSTLY)
def test_what_would_hold_up_every_step_is_refused(name: str) -> None:
    assert "takes too long to compute one token" in refusal(COSTLY[name])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(name: str) -> None:
    given, why = WRONG[name]

    assert why in refusal(given)


def test_what_is_too_large_is_not_even_tried() -> None:
    with pytest.raises(InvalidParameter, match="65,536 at most"):
        StructuredOutputs(regex="a" * (MAX_CHARACTERS + 1))


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(150)}}},
        {"json": '{"items":' * 40 + "{}" + "}" * 40},
        {"json": {"enum": [f"value {i}" for i in range(1000)]}},
        {"json": {"type": "string", "maxLength": 20_000}},
        {"regex": r"(# .{1,80}\n(- .{1,200}\n){1,10}){1,5}"},
        {"grammar": 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/'},
    ],
    ids=["150 optional properties", "40 levels", "1,000 values", "a long text", "an outline", "arithmetic"],
)
def test_what_people_write_passes(given: dict[str, object]) -> None:
    tried = run_trial(StructuredOutputs(**given))

    assert tried.notation
    assert 0 <= tried.num_bytes < 1 << 28


def test_unless_it_is_strict_a_schema_loses_what_cannot_be_enforced() -> None:
    tried = run_trial(StructuredOutputs(json={"type": "array", "uniqueItems": True}, strict=False))

    assert "uniqueItems" in tried.notation
