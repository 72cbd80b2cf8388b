"""Conversations as token ids, as the tokenizer's chat template writes them down."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

PART_SEPARATOR = "\n"  # between the parts of one message
_QUESTIONS = ("What", "7")  # that have nothing in common


def chat_token_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The token ids of a conversation that the assistant is to go on with. jinja2's TemplateError if the template does
    not take it."""
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
    )
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def chat_prefix(tokenizer: PreTrainedTokenizerBase, system: str | None, document: str) -> list[int]:
    """The token ids that conversations have in common whose first user message begins with *document*; a message of
    *system* may come before it. What chat_token_ids raises."""
    before = [] if system is None else [{"role": "system", "content": system}]
    first, second = (
        chat_token_ids(tokenizer, [*before, {"role": "user", "content": f"{document}{PART_SEPARATOR}{question}"}])
        for question in _QUESTIONS
    )
    num_common = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_common += 1
    return first[:num_common]
