"""Execution of a plan. The order of the requests determines what the server may have cached at each request."""

from collections.abc import Callable
from functools import partial

from kvtier.cli.prove.answer import UNCERTAIN, Answer, distance
from kvtier.cli.prove.cold import CacheBypass
from kvtier.cli.prove.dialect import NUM_TOKENS, ModelClient, Prompt, token_ids_of
from kvtier.cli.prove.evidence import Evidence, Request
from kvtier.cli.prove.families import Pieces, PromptGenerator
from kvtier.cli.prove.measures import Measures
from kvtier.cli.prove.plan import ProofPlan, Question, RunSettings
from kvtier.cli.prove.push_out import EvictionStep
from kvtier.cli.prove.questioner import Note, Questioner
from kvtier.cli.prove.writing import PromptFormat

NUM_HALF = NUM_TOKENS // 2
_NUM_SHAPES, _MAX_SHAPE_TRIES = 3, 6  # measurements of `shapes_apart` for each length, and prompts to try for them
_NUM_AGAIN = 2  # additional full prefills of a suspect's prompt, first alone and then as many concurrently


def shapes_apart(prompt: Prompt, ask_cold: Callable[[Prompt], Answer]) -> float | None:
    """Return the distance between two answers that should be equal, but are computed in batches of different shapes.

    First, the server computes the answer to the prompt. Then the first half of this answer is appended to the prompt,
    and the server computes the answer to this longer prompt, which should equal the second half of the first answer. So
    the server prefills tokens that it decoded before. Returns None if the answer's tokens cannot be appended to the
    prompt.
    """
    whole = ask_cold(prompt)
    longer = _continued(prompt, whole)
    if longer is None:
        return None
    again = ask_cold(longer)
    if whole.prompt_tokens is not None and again.prompt_tokens != whole.prompt_tokens + NUM_HALF:
        return None  # the server splits the longer text into other tokens
    return distance(whole.behind(NUM_HALF), again) if again.steps else None


def _continued(prompt: Prompt, answer: Answer) -> Prompt | None:
    if len(answer.steps) <= NUM_HALF:
        return None
    if not isinstance(prompt, str):
        ids = token_ids_of(answer)
        return None if ids is None else [*prompt, *ids[:NUM_HALF]]
    half = "".join(step.token for step in answer.steps[:NUM_HALF])
    return prompt + half if answer.text.startswith(half) and UNCERTAIN not in half else None


class Prover:
    """A sender of the requests of one plan. In concurrent rounds, at most *concurrency* requests are in flight."""

    def __init__(self, plan: ProofPlan, setting: RunSettings, concurrency: int, note: Note) -> None:
        self._plan = plan
        self._setting = setting
        self._note = note
        self._evidence = Evidence(plan, setting.writing.is_exact, setting.cold)
        self._questioner = Questioner(self._evidence.asked, setting.writing, concurrency, note)

    def prove(self, push_out: EvictionStep | None) -> Evidence:
        """Send all requests and return the evidence. Raise OSError or `Refused` if a server stops or fails.

        *push_out* evicts cached blocks between the earlier and the later prompts. If it is None, nothing is evicted.
        """
        self._ask_references()
        self._measure_shapes()
        alone = [question for question in self._plan.questions if question.is_alone]
        others = [question for question in self._plan.questions if not question.is_alone]
        if push_out is None:
            pairs = [request for each in alone for request in (self._earlier(each), _later(each))]
            later = self._questioner.ask_each("sending pairs of prompts that share a prefix", pairs)[1::2]
            self._questioner.ask_at_once("sending prompts concurrently", [self._earlier(each) for each in others])
        else:
            self._questioner.ask_each("sending prompts one by one", [self._earlier(each) for each in alone])
            self._questioner.ask_at_once("sending prompts concurrently", [self._earlier(each) for each in others])
            self._push_out(push_out)
            later = self._questioner.ask_each("sending prompts that share prefixes", [_later(each) for each in alone])
        later += self._questioner.ask_at_once("sending such prompts concurrently", [_later(each) for each in others])
        self._evidence.later = list(zip([*alone, *others], later, strict=True))
        self._ask_suspects_again()
        return self._evidence

    def _ask_references(self) -> None:
        """Make the server compute each prompt in full, first alone and then concurrently."""
        controls = [(each.asker, prompt) for each in self._plan.controls for prompt in each.prompts]
        if self._setting.cold is None:  # only prompts that share no prefix with others are sure to be computed in full
            requests = [Request(asker, prompt, is_reference=True) for asker, prompt in controls]
            self._questioner.ask_each("sending prompts without a shared prefix", requests)
            return
        prompts = [*controls, *((each.taker, each.pair.later) for each in self._plan.questions)]
        self._questioner.ask_each("computing prompts one by one", [self._cold(*each) for each in prompts])
        self._questioner.ask_at_once("computing prompts concurrently", [self._cold(*each) for each in prompts])

    def _measure_shapes(self) -> None:
        cold, asker = self._setting.cold, self._plan.controls[0].asker
        if cold is None or not asker.dialect.tells_logprobs:
            return
        lengths = sorted({control.length for control in self._plan.controls})
        for number, length in enumerate(lengths):
            self._note("computing answers in other shapes", number, len(lengths))
            found: list[float] = []
            for _ in range(_MAX_SHAPE_TRIES):
                apart = shapes_apart(self._continuable(asker, length), partial(self._computed, cold, asker))
                found += [] if apart is None else [apart]
                if len(found) == _NUM_SHAPES:
                    break
            self._evidence.shapes += found

    def _continuable(self, asker: ModelClient, length: int) -> Prompt:
        """Return a random prompt to which the tokens of its answer can be appended.

        It consists of token ids if the server accepts and returns token ids. Otherwise it is text.
        """
        writing: PromptFormat = self._setting.words
        if asker.dialect.tells_ids and self._setting.writing.is_exact:
            writing = self._setting.writing
        return writing.write(
            PromptGenerator(self._setting.source, writing.num_pieces).prompt(writing.pieces_of(length))
        )

    def _computed(self, cold: CacheBypass, asker: ModelClient, prompt: Prompt) -> Answer:
        return cold.ask(asker, prompt, self._setting.salts.new())

    def _push_out(self, push_out: EvictionStep) -> None:
        asker = self._plan.controls[0].asker
        longest = max(len(control.prompts[0]) for control in self._plan.controls)
        num_prompts = -(-push_out.num_tokens // max(control.length for control in self._plan.controls))
        draw = PromptGenerator(self._setting.source, self._setting.writing.num_pieces)
        fillers = [Request(asker, draw.fresh(longest)) for _ in range(num_prompts)]
        self._questioner.ask_at_once("sending other prompts, to evict these", fillers)
        self._note("waiting for the command and the server", 0, 1)
        push_out.run_command(list({question.taker: None for question in self._plan.questions}))
        self._evidence.was_evicted = True

    def _ask_suspects_again(self) -> None:
        # A suspect is an answer that seems wrong. It counts as correct after all if it is close to one of the new
        # answers, or if the new answers differ so much from each other that the allowed distance grows enough.
        suspects = Measures(self._evidence).suspects()
        if self._setting.cold is None or not suspects:
            return
        requests = [self._cold(one.request.asker, one.request.pieces) for one in suspects for _ in range(_NUM_AGAIN)]
        self._questioner.ask_each("computing suspects again", requests)
        requests = [self._cold(one.request.asker, one.request.pieces) for one in suspects for _ in range(_NUM_AGAIN)]
        self._questioner.ask_at_once("computing suspects again, concurrently", requests)

    def _cold(self, asker: ModelClient, pieces: Pieces) -> Request:
        if self._setting.cold is CacheBypass.SALT:
            return Request(asker, pieces, self._setting.salts.new(), is_reference=True)
        return Request(asker, pieces, is_read=False, is_reference=True)

    def _earlier(self, question: Question) -> Request:
        # If cold requests have no salt, the blocks that they computed may serve this request, so it is no reference.
        is_first = self._setting.cold is not CacheBypass.UNREAD
        return Request(question.giver, question.pair.earlier, question.earlier_salt, is_reference=is_first)


def _later(question: Question) -> Request:
    return Request(question.taker, question.pair.later, question.later_salt)
