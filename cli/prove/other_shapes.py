"""shapes_apart: how far answers are apart that are the same, computed in other shapes.

An answer's second half follows the first token by token. In another request, whose prompt has the first half at its
end, one pass over all of it leads to the same place. No cache is read for either.
"""

from collections.abc import Callable

from kvtier.cli.prove.answer import UNCERTAIN, Answer, distance
from kvtier.cli.prove.asker import NUM_TOKENS, Prompt
from kvtier.cli.prove.dialect import token_ids_of

NUM_HALF = NUM_TOKENS // 2


def shapes_apart(prompt: Prompt, ask_cold: Callable[[Prompt], Answer]) -> float | None:
    """The distance of the two for one prompt; None if the answer's tokens cannot be put behind it, or told apart."""
    whole = ask_cold(prompt)
    longer = _continued(prompt, whole)
    if longer is None:
        return None
    again = ask_cold(longer)
    if whole.prompt_tokens is not None and again.prompt_tokens != whole.prompt_tokens + NUM_HALF:
        return None  # the text is made other tokens of
    return distance(whole.behind(NUM_HALF), again) if again.steps else None


def _continued(prompt: Prompt, answer: Answer) -> Prompt | None:
    if len(answer.steps) <= NUM_HALF:
        return None
    if not isinstance(prompt, str):
        ids = token_ids_of(answer)
        return None if ids is None else [*prompt, *ids[:NUM_HALF]]
    half = "".join(step.token for step in answer.steps[:NUM_HALF])
    return prompt + half if answer.text.startswith(half) and UNCERTAIN not in half else None
