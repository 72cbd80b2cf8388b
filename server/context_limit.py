"""ContextLimit: the maximum length of a prompt and its continuation together, and the error messages about it."""

from dataclasses import dataclass

from kvtier.engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True)
class RequestLength:
    """The number of tokens in a request's *field*, and the number of tokens to generate.

    Unless *is_exact*, the prompt may be longer, because a text that is far too long is not tokenized to its end.
    """

    num_prompt: int
    num_new: int
    field: str
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The maximum number of tokens of a prompt and its continuation together.

    It is the smaller of the model's context length and the number of tokens that fit in device memory. `str(limit)` is
    the beginning of error messages about prompts that are too long.
    """

    num_tokens: int
    model_tokens: int | None  # the model's context length; None: the model has no limit
    option: str  # the setting that determines how many tokens fit in device memory

    @classmethod
    def of(cls, llm: AsyncEngine) -> "ContextLimit":
        """Return the limit of the engine *llm*, whose model is loaded."""
        has_share = llm.config.device.gpu_memory_utilization is not None
        option = "device.gpu_memory_utilization" if has_share else "device.capacity"
        return cls(llm.longest_request, llm.model_tokens, option)

    def __str__(self) -> str:
        if self.model_tokens is not None and self.num_tokens >= self.model_tokens:
            return f"This model's maximum context length is {self.num_tokens} tokens"
        model = "any number" if self.model_tokens is None else self.model_tokens
        return (
            f"This server's maximum context length is {self.num_tokens} tokens, because {self.option} has room for no "
            f"more (the model takes {model}); to raise it, restart the server with a larger {self.option}"
        )

    def exceeded_by(self, length: RequestLength) -> str:
        """Return the error message for a request of a *length* that exceeds the limit, in OpenAI's words."""
        num_prompt, num_new, field = length.num_prompt, length.num_new, length.field
        if not length.is_exact:
            return (
                f"{self}. With {num_new} in the completion, the prompt may have {max(0, self.num_tokens - num_new)}, "
                f"but it has {num_prompt} or more. Please shorten the prompt or the completion."
            )
        return (
            f"{self}. However, you requested {num_prompt + num_new} ({num_prompt} in the {field}, {num_new} in the "
            f"completion). Please shorten the {field} or the completion."
        )

    def exceeded_by_messages(self, length: RequestLength) -> str:
        """Return the same error message in Anthropic's words.

        Claude Code reads the numbers in it. It then asks for a shorter answer, or shortens the conversation.
        """
        num_prompt, num_new = length.num_prompt, length.num_new
        if num_prompt >= self.num_tokens:
            said = f"prompt is too long: {num_prompt} tokens > {self.num_tokens} maximum"
        else:
            said = f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_new} > {self.num_tokens}"
        return f"{said}. {self}. Shorten the {length.field} or lower max_tokens."
