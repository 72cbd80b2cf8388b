"""LangChain binds tools to a model that kvtier serves, and has it fill in a form."""

from typing import Literal

import httpx
import pytest
from plain_http import NO_TLS
from pydantic import BaseModel
from scripted_model import Scripted
from serving import DEADLINE_S, MODEL, ServerInThread

pytest.importorskip("langchain_openai")
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: Literal["Paris", "Rome"], is_warm: bool) -> str:
    """Says the weather of a city."""
    return f"{city}: {'warm' if is_warm else 'cold'}."


class search(BaseModel):
    """Looks it up."""

    depth: int


class Report(BaseModel):
    """What the weather is."""

    city: Literal["Paris", "Rome"]
    is_dry: bool


def model_of(server: ServerInThread, **options: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=MODEL,
        max_retries=0,
        timeout=DEADLINE_S,
        max_tokens=200,
        http_client=httpx.Client(verify=NO_TLS),
        temperature=0,
        **options,
    )


def test_a_bound_tool_is_called_run_and_its_result_sent_back(tool_server: ServerInThread, script: Scripted) -> None:
    calling = model_of(tool_server, logit_bias=script.saying("call")["logit_bias"]).bind_tools([get_weather])
    telling = model_of(tool_server, logit_bias=script.saying("text")["logit_bias"]).bind_tools([get_weather])
    messages: list = [HumanMessage("Rain?")]

    answer = calling.invoke(messages)
    (call,) = answer.tool_calls
    result = get_weather.invoke(call)
    last = telling.invoke([*messages, answer, result])

    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris", "is_warm": True})
    assert isinstance(result, ToolMessage)
    assert (result.content, result.tool_call_id) == ("Paris: warm.", call["id"])
    assert last.content.startswith("It is dry")
    assert answer.usage_metadata["total_tokens"] > 0


def test_a_bound_tool_is_called_in_a_stream(tool_server: ServerInThread, script: Scripted) -> None:
    calling = model_of(tool_server, logit_bias=script.saying("calls")["logit_bias"])

    whole: AIMessage | None = None
    for piece in calling.bind_tools([get_weather, search]).stream("Rain?"):
        whole = piece if whole is None else whole + piece

    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [
        ("search", {"depth": 2}),
        ("get_weather", {"city": "Rome"}),
    ]


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_a_tool_that_has_to_be_called_is(tool_server: ServerInThread, choice: str) -> None:
    forced = model_of(tool_server).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)

    (call,) = forced.invoke("Rain?").tool_calls

    assert call["args"]["city"] in ("Paris", "Rome")
    assert isinstance(call["args"]["is_warm"], bool)


@pytest.mark.parametrize("strict", [None, True])
def test_a_form_is_filled_in(tool_server: ServerInThread, strict: bool | None) -> None:
    filling = model_of(tool_server).with_structured_output(Report, method="function_calling", strict=strict)

    assert isinstance(filling.invoke("Rain?"), Report)
