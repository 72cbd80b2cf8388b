"""OpenAI's Agents SDK as its documentation says for other servers: an agent with a tool; prints one JSON object.

It runs in an environment of its own, of which nothing else is known here.
"""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

base_url, key, model = sys.argv[1:]
called: list[str] = []


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    called.append(city)
    return "rain"


def told(result) -> dict:
    """What a run has said and counted."""
    usage = result.context_wrapper.usage
    return {
        "text": result.final_output,
        "num_responses": len(result.raw_responses),
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.input_tokens_details.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


async def main() -> None:
    """Run the agent whole, as a continuation, streamed, and with a session that the client keeps."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)
    agent = Agent(
        name="forecaster",
        instructions="Ask the tool about the weather.",
        model=OpenAIResponsesModel(model=model, openai_client=client),
        model_settings=ModelSettings(temperature=0),
        tools=[weather],
    )

    whole = await Runner.run(agent, "What is the weather in Paris?")
    again = await Runner.run(agent, "And now?", previous_response_id=whole.last_response_id)
    streamed = Runner.run_streamed(agent, "What is the weather in Paris?")
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    session = SQLiteSession("kept by the client")
    await Runner.run(agent, "What is the weather in Paris?", session=session)
    kept = await Runner.run(agent, "And now?", session=session)

    runs = {"whole": whole, "again": again, "streamed": streamed, "kept": kept}
    print(json.dumps({"called": called, "kinds": kinds, **{name: told(run) for name, run in runs.items()}}))


asyncio.run(main())
