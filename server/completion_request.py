"""CompletionRequest: the body of `POST /v1/completions`."""

from collections.abc import Sequence
from typing import Annotated, cast

import msgspec
from transformers import PreTrainedTokenizerBase

from kvtier.engine.llm import encode
from kvtier.engine.text.min_tokens import PromptLimit
from kvtier.server.generation_request import IGNORED, GenerationRequest, LogprobCount, TokenCount
from kvtier.server.prompt import Prompt

DEFAULT_MAX_TOKENS = 16  # OpenAI's
COMPLETION_IGNORED = IGNORED | {"reasoning_effort"}  # only chat templates use it


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to continue one or more prompts, each given as text or as token ids.

    With *echo*, each choice begins with its prompt, and *logprobs* covers the prompt's tokens too. With *max_tokens* 0,
    nothing is generated.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] = DEFAULT_MAX_TOKENS
    logprobs: LogprobCount | None = None
    best_of: TokenCount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported; leave it out, or set n and choose the best answer yourself")
        if not self.max_tokens and not self.covers_prompt:
            raise ValueError("max_tokens: with 0 the answer would be empty; ask for 1 or more, or set echo to true")
        if isinstance(self.prompt, list) and len({type(item) for item in self.prompt}) != 1:
            raise ValueError("prompt: give a text, a list of texts, token ids, or a list of lists of token ids")

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of top log probabilities to return for each generated token; None: no log probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of top log probabilities to compute for each prompt token; None: no log probabilities."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def covers_prompt(self) -> bool:
        """True if the answer contains the prompt, or log probabilities of its tokens."""
        return self.echo or super().covers_prompt

    @property
    def num_prompts(self) -> int:
        """Number of prompts. Each prompt gets *n* choices."""
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit, document: Sequence[int] = ()
    ) -> list[Prompt]:
        """Tokenize and return the prompts. Each prompt begins with the token ids of *document*, if there is one.

        With a document, no special tokens are added to a prompt's text, because the document already begins with them.

        Raises:
            TooManyTokens: A prompt exceeds *limit*.
            UnknownToken: The tokenizer does not have a token id of a prompt.
        """
        asked = [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt
        prompts = [(prompt, _encode(tokenizer, prompt, limit, not document)) for prompt in asked]
        if document:
            return [Prompt([*document, *token_ids]) for _, token_ids in prompts]
        return [Prompt(ids, text=prompt if isinstance(prompt, str) else None) for prompt, ids in prompts]

    def max_new_tokens(self, room: int) -> int:
        """Return *max_tokens*, even if it is more than *room*, the number of tokens that fit after the prompt."""
        return self.max_tokens


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: object, limit: PromptLimit, is_whole: bool) -> Sequence[int]:
    if not isinstance(prompt, str):
        token_ids = cast(list[int], prompt)  # its type was checked with the request
        limit.check_ids(token_ids)
        return token_ids
    limit.check_text(prompt)
    if is_whole:
        return encode(tokenizer, prompt)
    encoded: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return encoded
