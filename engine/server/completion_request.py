"""`POST /v1/completions`: prompts to continue."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from kvtier.engine.llm import encode
from kvtier.engine.server.generation_request import GenerationRequest, LogprobCount, TokenCount

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt or many, each a text or token ids."""

    prompt: str | list[str | int | list[int]]
    max_tokens: TokenCount = DEFAULT_MAX_TOKENS
    logprobs: LogprobCount | None = None
    best_of: TokenCount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported; leave it out, and choose among n yourself")
        if isinstance(self.prompt, list) and len({type(item) for item in self.prompt}) != 1:
            raise ValueError("prompt: give a text, a list of texts, token ids, or a list of lists of token ids")

    @property
    def num_top_logprobs(self) -> int | None:
        """As asked for."""
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        """Each of them has *n* choices."""
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    def prompts(self, tokenizer: PreTrainedTokenizerBase, document: Sequence[int] = ()) -> list[Sequence[int]]:
        """The prompts' token ids, each after those of the document, which begins with the special tokens if any."""
        if isinstance(self.prompt, str):
            prompts = [_encode(tokenizer, self.prompt, not document)]
        elif isinstance(self.prompt[0], int):
            prompts = [[item for item in self.prompt if isinstance(item, int)]]
        else:
            prompts = [_encode(tokenizer, item, not document) for item in self.prompt if not isinstance(item, int)]
        return [[*document, *prompt] for prompt in prompts] if document else prompts

    def max_new_tokens(self, room: int) -> int:
        """How many tokens to generate; *room* is what the longest request has left."""
        return self.max_tokens


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str | list[int], is_whole: bool) -> Sequence[int]:
    if is_whole or not isinstance(prompt, str):
        return encode(tokenizer, prompt)
    token_ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return token_ids
