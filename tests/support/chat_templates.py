"""Chat templates in the shapes that models ship, without their system prompts and tools."""

from small_models import byte_tokenizer
from transformers import PreTrainedTokenizerFast

# Trims each text, as Llama 3.x does.
LLAMA = """\
{%- for m in messages %}{{ '<|start|>' + m['role'] + '<|end|>\\n\\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""

# Writes the thoughts of answers behind the last question, as Qwen 3 does, from the field or from the text.
QWEN = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content if m.content is string else '' %}
{%- set thoughts = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if not thoughts and '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content.lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Drops thoughts, and joins arguments to a text, as DeepSeek R1 does.
DEEPSEEK = """\
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['tool_calls'] %}
{%- for call in m['tool_calls'] %}
{{- '<|Call|>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```' }}{% endfor %}
{%- elif m['role'] == 'assistant' %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + '<|end|>' }}
{%- elif m['role'] == 'tool' %}{{ '<|Output|>' + m['content'] }}
{%- else %}{{ m['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

# Goes through arguments as a mapping, as GLM 4.5 does.
GLM = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}
{{- '<think>' + m.reasoning_content.strip() + '</think>' if m.reasoning_content else '<think></think>' }}
{{- '\\n' + m.content.strip() if m.content.strip() }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}
{%- for k, v in call.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key><arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' and m.content is not string %}{% for each in m.content %}{{ each.output }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# Calls the thoughts thinking, and refuses them beside a text and a call, as gpt-oss does.
GPT_OSS = """\
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking cannot both be in a call') }}{% endif %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking or '') + '<|end|>' }}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# A guard model that reads the first part, and wants roles to alternate.
GUARD = """\
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '\\n\\n' + m['role'] | capitalize + ': ' + m['content'][0]['text'] }}{% endfor %}
{{- '\\n\\nIs the last message safe?' }}"""

# Of a vision model, with filters over the parts.
VISION = """\
{%- for m in messages %}{{ m['role'].upper() + ': ' }}
{%- for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}
{%- for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

# Takes the user's parts, and the text of the other roles.
MIXED = """\
{%- for m in messages %}{{ '[' + m.role + ']' }}
{%- if m.role == 'user' %}{% for part in m.content %}{{ part.text }}{% endfor %}
{%- else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"""

# Takes either form, as Llama 3.2 Vision does.
EITHER = """\
{%- for m in messages %}{{ '<' + m.role + '>' }}
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ '<part>' + part.text }}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""

# Wants alternating roles and no system message, as Gemma 2 does.
GEMMA = """\
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + m['content'] | trim }}
{{- '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Knows no system messages, and leaves them out.
NO_SYSTEM = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"""

# Broken: writes no text of anybody's.
SILENT = "{% for m in messages %}<{{ m.role }}>{% endfor %}"

ALL = {
    "llama": LLAMA,
    "qwen": QWEN,
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "gpt_oss": GPT_OSS,
    "guard": GUARD,
    "vision": VISION,
    "mixed": MIXED,
    "either": EITHER,
    "gemma": GEMMA,
    "no_system": NO_SYSTEM,
}


def templated(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with that template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer
