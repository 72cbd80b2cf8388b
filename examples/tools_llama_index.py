"""Has a model call a tool with LlamaIndex, and prints what the tool says. The model has to be made for tools.

kvtier serve --model Qwen/Qwen3-0.6B
python examples/tools_llama_index.py --model Qwen/Qwen3-0.6B "When is the library open on Sunday?"
"""

from server import arguments  # first: errors of the imports below are one line, too

# isort: split
from typing import Literal

from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

HOURS = {"saturday": "10 to 16", "sunday": "closed"}


def opening_hours(day: Literal["weekday", "saturday", "sunday"]) -> str:
    """Says when the library is open."""
    return f"{day}: {HOURS.get(day, '9 to 19')}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("question")
    parser.add_argument("--free", action="store_true", help="let the model answer without a tool, if it likes")
    options = parser.parse_args()
    model = OpenAILike(
        api_base=options.base_url,
        api_key=options.api_key,
        max_retries=0,
        model=options.model,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=options.max_tokens,
    )

    answer = model.chat_with_tools(
        [FunctionTool.from_defaults(opening_hours)], options.question, tool_required=not options.free
    )
    for call in model.get_tool_calls_from_response(answer, error_on_no_tool_call=False):
        print(f"{call.tool_name}({call.tool_kwargs}) -> {opening_hours(**call.tool_kwargs)}")
    if answer.message.content:
        print(answer.message.content)


if __name__ == "__main__":
    main()
