"""What models of each family write, recorded or as their makers describe it, and what is to be read of it."""

from dataclasses import dataclass, field

NAMES = ("get_weather", "search")


@dataclass(frozen=True)
class Recorded:
    """An answer, and what it says."""

    name: str
    text: str
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments, the text of JSON as written
    content: str = ""

    def __str__(self) -> str:
        return self.name


PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome", "days": [1, 2, {"a": "}]\\""}]}'
_PARIS = f'{{"name": "get_weather", "arguments": {PARIS}}}'
_ROME = f'{{"name": "search", "arguments": {ROME}}}'
_BOTH = [("get_weather", PARIS), ("search", ROME)]
_ONE = _BOTH[:1]
_LLAMA = _PARIS.replace("arguments", "parameters")

RECORDED: dict[str, list[Recorded]] = {
    "hermes": [
        Recorded("one", f"<tool_call>\n{_PARIS}\n</tool_call>", _ONE),
        Recorded("two", f"<tool_call>\n{_PARIS}\n</tool_call>\n<tool_call>\n{_ROME}\n</tool_call>", _BOTH),
        Recorded("text before", f"I look.\n\n<tool_call>{_PARIS}</tool_call>", _ONE, "I look."),
        Recorded("text behind", f"<tool_call>{_PARIS}</tool_call> So.\n", _ONE, " So.\n"),
        Recorded("a list", f"<tool_call>[{_PARIS}, {_ROME}]</tool_call>", _BOTH),
        Recorded("arguments first", f'<tool_call>{{ "arguments": {PARIS}, "name": "get_weather"}}</tool_call>', _ONE),
        Recorded("no end marker", f"<tool_call>\n{_PARIS}", _ONE),
        Recorded(
            "JSON in JSON",
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
            _ONE,
        ),
        Recorded(
            "thoughts before",
            f"<think>\nHm.\n</think>\n\n<tool_call>\n{_PARIS}\n</tool_call>",
            _ONE,
            "<think>\nHm.\n</think>",
        ),
        Recorded(
            "a bad one before a good one",
            f"<tool_call>{{bad</tool_call>\n<tool_call>{_PARIS}</tool_call>",
            _ONE,
            "<tool_call>{bad</tool_call>",
        ),
    ],
    "llama3_json": [
        Recorded("one", _LLAMA, _ONE),
        Recorded("white space", f"\n {_LLAMA}\n", _ONE),
        Recorded("two", f"{_LLAMA}; {_ROME.replace('arguments', 'parameters')}", _BOTH),
        Recorded("with a tag", f"<|python_tag|>{_LLAMA}", _ONE),
        Recorded("with a type", f'{{"type": "function", {_LLAMA[1:]}', _ONE),
        Recorded("text behind", f"{_LLAMA}\nI asked.", _ONE, "\nI asked."),
        Recorded(
            "JSON that is no call",
            '{"city": "Paris", "name": "get_weather"}',
            [],
            '{"city": "Paris", "name": "get_weather"}',
        ),
        Recorded("JSON within a text", f"It says {_LLAMA}", [], f"It says {_LLAMA}"),
    ],
    "mistral": [
        Recorded("one", f"[TOOL_CALLS] [{_PARIS}]", _ONE),
        Recorded("two", f"[TOOL_CALLS][{_PARIS}, {_ROME}]", _BOTH),
        Recorded("with ids", f'[TOOL_CALLS] [{_PARIS[:-1]}, "id": "a1b2c3d4e"}}]', _ONE),
        Recorded("text before", f"I look.[TOOL_CALLS][{_PARIS}]", _ONE, "I look."),
    ],
    "mistral_args": [
        Recorded("one", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", _ONE),
        Recorded("two", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]search[ARGS]{ROME}", _BOTH),
        Recorded("with an id", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}", _ONE),
        Recorded("without a mark between", f"[TOOL_CALLS]get_weather{PARIS}", _ONE),
    ],
    "granite": [Recorded("two", f"<|tool_call|>[{_PARIS}, {_ROME}]", _BOTH)],
    "jamba": [Recorded("two", f"<tool_calls>[\n{_PARIS},\n{_ROME}\n]</tool_calls>", _BOTH)],
    "phi4_mini_json": [
        Recorded("two", f"functools[{_PARIS}, {_ROME}]", _BOTH),
        Recorded("the word", "functools is a module", [], "functools is a module"),
    ],
    "json": [
        Recorded("one", _PARIS, _ONE),
        Recorded("a list", f"[{_PARIS}, {_ROME}]", _BOTH),
        Recorded("in rows", f"{_PARIS}\n{_ROME}", _BOTH),
        Recorded("fenced", f"```json\n{_PARIS}\n```", _ONE),
        Recorded("a fenced object that is no call", '```json\n{"a": 1}\n```', [], '```json\n{"a": 1}\n```'),
    ],
}

# In every family: what begins like a call and is none.
BROKEN = {
    "cut off": '{"name": "get_weather", "arguments": {"city": "Par',
    "no comma": '{"name": "get_weather" "arguments": {}}',
    "no brace": '{"name": "get_weather", "arguments": {"city": "Paris"}',
    "another tool": '{"name": "rm", "arguments": {}}',
    "no name": '{"arguments": {}}',
    "a name that is none": '{"name": 7, "arguments": {}}',
    "no arguments": '{"name": "get_weather"}',
    "arguments that are a list": '{"name": "get_weather", "arguments": [1]}',
    "arguments that are a word": '{"name": "get_weather", "arguments": "Paris"}',
    "not a number": '{"name": "get_weather", "arguments": {"x": NaN}}',
    "Python": "{'name': 'get_weather', 'arguments': {}}",
    "a raw line feed in a text": '{"name": "get_weather", "arguments": {"city": "Pa\nris"}}',
    "deep": '{"name": "get_weather", "arguments": {"x": ' + "[" * 1200 + "]" * 1200 + "}}",
    "an empty list": "[]",
    "a closing bracket": "]}",
    "words": "the weather",
    "nothing": "",
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_warm": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"depth": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["depth"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, SEARCH]

# What the scripted model says, in Qwen's form; no two end alike.
SCRIPTS = {
    "text": "It is dry, and it stays so.",
    "call": 'I shall look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "is_warm": true}}\n'
    "</tool_call>",
    "calls": '<tool_call>\n{"name": "search", "arguments": {"depth": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n',
    "broken": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris",}}\n</tool_call>...',
    "half": "I might write <tool_c",
    "json": '{"answer": "dry"}',
}
