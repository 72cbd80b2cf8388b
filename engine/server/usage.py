"""Usage: what a request took, in OpenAI's words and in kvtier's."""

from dataclasses import dataclass, field

from kvtier.engine.scheduling.request import Completion
from kvtier.tiers.lower.statistics import TokenBalance


@dataclass(slots=True)
class Usage:
    """Adds up one request. A prompt counts once, however many choices it has: as its first choice found it."""

    num_choices: int  # of each prompt
    prompts: TokenBalance = field(default_factory=TokenBalance)
    num_generated: int = 0
    ttft_s: float | None = None  # the engine's, of the first prompt
    is_pinned: bool | None = None  # whether all prompts are kept in host memory now; None: nobody asked for it

    def add(self, index: int, completion: Completion) -> None:
        """The choice at *index* has ended so."""
        self.num_generated += len(completion.token_ids)
        if index % self.num_choices == 0:
            self.prompts = self.prompts.plus(completion.tokens)
        if index == 0:
            self.ttft_s = completion.ttft_s

    def openai(self) -> dict[str, object]:
        """`usage`."""
        num_prompt = self.prompts.num_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": num_prompt - self.prompts.recomputed},
        }

    def kvtier(self) -> dict[str, object]:
        """`kvtier`: where the prompts' tokens came from, and why those that were computed were."""
        pinned = {} if self.is_pinned is None else {"pinned": self.is_pinned}
        return {"tokens": self.by_tier(), "reasons": dict(self.prompts.reasons), "ttft_s": self.ttft_s, **pinned}

    def by_tier(self) -> dict[str, int]:
        """Tokens of the prompts by where they came from."""
        tokens = self.prompts
        return {
            "device": tokens.device,
            "host": tokens.host,
            "disk": tokens.disk,
            "recomputed": tokens.recomputed,
        }
