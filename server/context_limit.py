"""ContextLimit: the maximum length of a prompt and its continuation together, for error messages."""

from dataclasses import dataclass

from kvtier.engine.async_engine import AsyncEngine


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
            f"more (the model takes {model})"
        )
