"""Prompts of conversations with texts and images, written with the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvtier.engine.images.image_prompt import ImagePrompt
from kvtier.engine.text.chat_template import PART_SEPARATOR, TEMPLATE_ERRORS, chat_text
from kvtier.engine.text.template_traits import TemplateTraits


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> ImagePrompt:
    """Return the prompt of a conversation, which ends where the assistant's next message begins.

    A message has a `role` and a `content`: a text, or a list of the parts `{"type": "text", "text": ...}` and
    `{"type": "image", "image": ...}`, whose image is a PIL image.

    Raises:
        ValueError: If the tokenizer has no chat template, the template rejects the messages, or a part is unknown.
    """
    if tokenizer.chat_template is None:
        raise ValueError("chat: the model's tokenizer has no chat template; use generate, or a model made for chats")
    traits = TemplateTraits.of(tokenizer, has_tools=False)
    images: list[Any] = []
    written = [_written(message, traits, images) for message in messages]
    try:
        text = chat_text(tokenizer, written)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"chat: the model's chat template rejects these messages: {error}") from error
    return ImagePrompt(tokenizer(text, add_special_tokens=False)["input_ids"], images)


def _written(message: Mapping[str, Any], traits: TemplateTraits, images: list[Any]) -> dict[str, Any]:
    """Return a message as input for the template, and append its images to *images*."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return {"role": role, "content": traits.content(role, content)}
    found, parts = [], []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "image": image}:
                parts.append({"type": "image"})
                found.append(image)
            case _:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"chat: unknown part {kind!r} of a message; give texts and images")
    images += found
    if not found:
        return {"role": role, "content": traits.content(role, PART_SEPARATOR.join(part["text"] for part in parts))}
    return {"role": role, "content": parts}
