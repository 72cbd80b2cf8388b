"""Prompts that are cut to their last tokens."""

from kvtier.server.documents.kept_prefixes import Breakpoint
from kvtier.server.prompt import Prompt

PROMPT = Prompt([1, 2, 3, 4, 5], [Breakpoint(2, 3600.0), Breakpoint(4, 300.0)])


def test_breakpoints_stay_behind_their_tokens_when_a_prompt_is_cut() -> None:
    assert PROMPT.last(4) == Prompt([2, 3, 4, 5], [Breakpoint(1, 3600.0), Breakpoint(3, 300.0)])


def test_a_breakpoint_with_nothing_left_before_it_is_gone() -> None:
    assert PROMPT.last(3) == Prompt([3, 4, 5], [Breakpoint(2, 300.0)])


def test_a_prompt_that_is_short_enough_is_whole() -> None:
    assert PROMPT.last(5) == PROMPT.last(9) == PROMPT
