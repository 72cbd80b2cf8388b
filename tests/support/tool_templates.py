"""Chat templates with tools, in the forms that families of models have them."""

from small_models import byte_tokenizer
from transformers import PreTrainedTokenizerFast

QWEN = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nCall one so:\\n<tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls %}{% set call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Wants descriptions, and the name of the tool that has answered; writes the arguments first.
HERMES = """\
{%- for tool in tools or [] %}{{ '<tools>' + tool.function.name + ': ' + tool.function.description }}{% endfor %}
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- if m.role == 'tool' %}
{%- if m.name is not defined %}{{ raise_exception('a tool needs a name') }}{% endif %}
{{- '{"name": "' + m.name + '", "content": ' }}{{ m.content | tojson }}{{ '}' }}
{%- elif m.tool_calls is defined %}{% for call in m.tool_calls %}
{{- '<tool_call>\\n{ "arguments": ' }}{{ call.function.arguments | tojson }}
{{- ', "name": "' + call.function.name + '"}\\n</tool_call> ' }}
{%- endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"""

LLAMA = """\
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- for m in messages %}{{ '<|start|>' + m.role + '<|end|>' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('only one call at once') }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}' }}
{%- else %}
{%- if loop.first and tools is not none %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{{- m.content }}{% endif %}{{ '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>' }}{% endif %}"""

# Refuses ids of another length, and has tools before the last question.
MISTRAL = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if loop.last and tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.content + '[' + m.tool_call_id + ']' }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""

MISTRAL_ARGS = """\
{{- (tools | tojson) if tools }}
{%- for m in messages %}{{ '[' + m.role + ']' + m.content }}
{%- for call in m.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{% endfor %}
{%- endfor %}"""

# Writes arguments as they are: an object would be Python's.
PHI = """\
{{- (('Write functools[...]. ' ~ (tools | tojson)) if tools) }}
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}
{%- for call in m.tool_calls %}
{{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments ~ '}' }}{% endfor %}
{%- endfor %}{{ '<|assistant|>' }}"""

# Knows tools, and no calls.
PLAIN = """\
{{- (tools | tojson) if tools }}
{%- for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}{{ '<assistant>' }}"""

FAMILIES = {
    "hermes": [QWEN, HERMES],
    "llama3_json": [LLAMA],
    "mistral": [MISTRAL],
    "mistral_args": [MISTRAL_ARGS],
    "phi4_mini_json": [PHI],
    "granite": [PLAIN + "{# <|tool_call|> #}"],
    "jamba": [PLAIN + "{# <tool_calls> #}"],
    "json": [PLAIN],
}


def tool_tokenizer(template: str = QWEN) -> PreTrainedTokenizerFast:
    """Of bytes, with that template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer
