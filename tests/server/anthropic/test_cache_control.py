"""`cache_control`: what of a prompt is kept, for whom and for how long, and whether the usage tells what happened."""

from collections.abc import Iterator

import anthropic
import pytest
from anthropic_client import GREEDY, ask, client_of
from serving import BLOCK_SIZE, MODEL, ServerInThread, chat_tokenizer, come_true, serving, tables
from small_models import build

from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.tiers.naming.tier import Tier

DOCUMENT = "The harbour of Falmouth is deep, and its code is walnut. " * 5
FIVE_MINUTES = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def running() -> Iterator[ServerInThread]:
    """Room for pins of 40 blocks."""
    with serving(build("llama"), tables(num_slots=80)) as address:
        yield address


@pytest.fixture
def server(running: ServerInThread) -> ServerInThread:
    """The same, which has forgotten what the tests before have asked."""
    come_true(lambda: running.ask(lambda core: core.reset()))
    return running


def text(content: str, **control: object) -> dict[str, object]:
    return {"type": "text", "text": content, **({"cache_control": control} if control else {})}


def document(content: str, **control: object) -> dict[str, object]:
    source = {"type": "text", "media_type": "text/plain", "data": content}
    return {"type": "document", "source": source, **({"cache_control": control} if control else {})}


def question(*blocks: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(blocks)}]


def whole_blocks(content: str) -> int:
    """Tokens of the whole blocks in a text of so many bytes."""
    return len(content) // BLOCK_SIZE * BLOCK_SIZE


def held_tokens(server: ServerInThread) -> int:
    held = server.ask(lambda core: core.cache.pins.max_bytes - core.cache.pins.free_bytes)
    return held // 1024  # bytes of a token


def counts(usage: anthropic.types.Usage) -> tuple[int, int, int]:
    return usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens


def test_a_document_is_created_once_and_then_read(server: ServerInThread) -> None:
    before = len(f"<user>{DOCUMENT}")
    created = whole_blocks(f"<user>{DOCUMENT}")

    first = ask(server, messages=question(document(DOCUMENT, **FIVE_MINUTES), text("Where?")))
    again = ask(server, messages=question(document(DOCUMENT, **FIVE_MINUTES), text("What?")))

    num_first = len(f"<user>{DOCUMENT}\nWhere?\n<assistant>")
    assert counts(first.usage) == (0, created, num_first - created)
    assert first.usage.cache_creation.ephemeral_5m_input_tokens == created
    assert first.usage.cache_creation.ephemeral_1h_input_tokens == 0
    read, more, others = counts(again.usage)
    assert (more, read + others) == (0, num_first - 1)
    assert read >= before
    assert again.kvtier["tokens"]["device"] == read
    assert (first.kvtier["pinned"], again.kvtier["pinned"]) == (True, True)
    assert held_tokens(server) == created


def test_a_kept_document_outlives_what_flushes_host_memory_and_another_does_not(server: ServerInThread) -> None:
    other = DOCUMENT.lower()
    ask(server, messages=question(document(DOCUMENT, **FIVE_MINUTES), text("Where?")))
    ask(server, messages=question(document(other), text("Where?")))
    for number in range(12):  # more than device and host hold
        server.complete([number] * 18 * BLOCK_SIZE, max_tokens=1)

    kept, left = (
        ask(server, messages=question(document(content, **FIVE_MINUTES), text("What?")))
        for content in (DOCUMENT, other)
    )

    assert kept.usage.cache_read_input_tokens == kept.kvtier["tokens"]["host"] == whole_blocks(f"<user>{DOCUMENT}")
    assert left.usage.cache_read_input_tokens < BLOCK_SIZE  # what both begin with
    server.ask(lambda core: core.cache.check())


def test_a_stream_tells_with_its_first_event_what_was_kept(server: ServerInThread) -> None:
    messages = question(document(DOCUMENT, **HOUR), text("Where?"))
    with client_of(server).messages.stream(model=MODEL, max_tokens=4, messages=messages, **GREEDY) as stream:
        first = next(iter(stream))
        final = stream.get_final_message()

    created = whole_blocks(f"<user>{DOCUMENT}")
    for usage in (first.message.usage, final.usage):
        assert usage.cache_creation_input_tokens == usage.cache_creation.ephemeral_1h_input_tokens == created
    assert final.usage.output_tokens == 4


def test_each_ttl_has_the_tokens_between_its_breakpoint_and_the_one_before(server: ServerInThread) -> None:
    asked = {
        "system": [text("You know harbours." * 4, **HOUR)],
        "messages": question(document(DOCUMENT, **FIVE_MINUTES), text("Where?")),
    }

    usage = ask(server, **asked).usage

    of_hour = whole_blocks("<system>" + "You know harbours." * 4)
    of_both = whole_blocks("<system>" + "You know harbours." * 4 + "\n<user>" + DOCUMENT)
    assert usage.cache_creation.ephemeral_1h_input_tokens == of_hour
    assert usage.cache_creation.ephemeral_5m_input_tokens == of_both - of_hour
    assert held_tokens(server) == of_both


def test_a_chat_whose_breakpoint_moves_on_takes_each_token_once(server: ServerInThread) -> None:
    messages: list[dict[str, object]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{DOCUMENT[: 80 + 40 * turn]}"})
        answer = ask(server, messages=messages, cache_control=FIVE_MINUTES)
        messages.append({"role": "assistant", "content": answer.content[0].text.encode("ascii", "replace").decode()})

    read, created, others = counts(answer.usage)
    end = read + created + others - len("\n<assistant>")  # of the last message
    assert held_tokens(server) == end // BLOCK_SIZE * BLOCK_SIZE
    assert read > 0


def test_without_room_nothing_is_said_to_be_kept(server: ServerInThread) -> None:
    long = DOCUMENT * 3

    answer = ask(server, messages=question(document(long, **FIVE_MINUTES), text("Where?")))

    assert counts(answer.usage)[:2] == (0, 0)
    assert answer.kvtier["pinned"] is False
    assert held_tokens(server) == 0


def test_a_breakpoint_in_the_first_block_keeps_nothing(server: ServerInThread) -> None:
    answer = ask(server, messages=question(text("Hi.", **FIVE_MINUTES), text(DOCUMENT)))

    assert counts(answer.usage)[:2] == (0, 0)
    assert answer.kvtier["pinned"] is False


def test_what_is_kept_ends_after_its_time_and_reading_makes_it_last() -> None:
    clock = FakeClock()

    def put_clock(core: EngineCore) -> None:
        core.pins = TimedPins(core.cache, clock)

    messages = question(document(DOCUMENT, **FIVE_MINUTES), text("Where?"))
    with serving(build("llama"), tables(num_slots=80)) as server:
        server.ask(put_clock)
        for clock.now in (0.0, 200.0, 400.0):
            ask(server, messages=messages)
            assert held_tokens(server) > 0

        clock.now = 701.0
        come_true(lambda: held_tokens(server) == 0)


def test_a_tenant_keeps_within_its_share(server: ServerInThread) -> None:
    keys = {"sk-ann-1111": "ann", "sk-bob-2222": "bob"}
    messages = question(document(DOCUMENT, **FIVE_MINUTES), text("Where?"))
    other = question(document(DOCUMENT.upper(), **FIVE_MINUTES), text("Where?"))
    with serving(build("llama"), tables(num_slots=80), keys) as shared:
        kept = [ask(shared, key=key, messages=each).kvtier["pinned"] for key in keys for each in (messages, other)]

    assert kept == [True, False, True, False]


@pytest.mark.parametrize(
    ("controls", "told"),
    [
        ([FIVE_MINUTES] * 5, "5 breakpoints; give 4 at most"),
        ([FIVE_MINUTES, HOUR], "the longer ones must come first"),
        ([{"type": "permanent"}], "cache_control.type"),
        ([{"type": "ephemeral", "ttl": "2h"}], "cache_control.ttl"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_breakpoints_that_anthropic_would_refuse_are_refused(
    server: ServerInThread, path: str, controls: list[dict[str, str]], told: str
) -> None:
    blocks = [text("word " * 9, **control) for control in controls]

    answer = server.post(path, json={"model": MODEL, "max_tokens": 1, "messages": question(*blocks)})

    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_openai_chats_take_the_same_key_in_parts_and_messages(server: ServerInThread) -> None:
    in_part = question(text(DOCUMENT, **FIVE_MINUTES), text("Where?"))
    in_message = [
        {"role": "system", "content": "You know harbours. " * 4, "cache_control": HOUR},
        {"role": "user", "content": "Where?"},
    ]
    client = server.openai()

    of_part, again, of_message = (
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, temperature=0)
        for messages in (in_part, in_part, in_message)
    )

    created = whole_blocks(f"<user>{DOCUMENT}")
    assert of_part.kvtier["cache_creation"] == {"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0}
    assert again.kvtier["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    assert again.usage.prompt_tokens_details.cached_tokens >= created
    more = whole_blocks("<system>" + "You know harbours. " * 4)
    shared = of_message.usage.prompt_tokens_details.cached_tokens  # "<", with which both begin
    told = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": more - shared}
    assert of_message.kvtier["cache_creation"] == told
    assert of_message.kvtier["pinned"]
    assert held_tokens(server) == created + more


def test_what_anthropics_requests_keep_openais_read(server: ServerInThread) -> None:
    ask(server, messages=question(text(DOCUMENT, **FIVE_MINUTES), text("Where?")))

    body = {"model": MODEL, "messages": question(text(DOCUMENT), text("What?")), "max_tokens": 1}
    usage = server.post("/v1/chat/completions", json=body).json()["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] >= whole_blocks(f"<user>{DOCUMENT}")


def test_a_template_that_trims_and_answers_out_of_order_moves_the_breakpoint_with_the_text() -> None:
    """The last message comes first, and each is stripped of the spaces around it."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages | reverse %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}<assistant>"
    )
    spaced = f"  {DOCUMENT.strip()}   \n"
    with serving(build("llama"), tables(num_slots=80), tokenizer=tokenizer) as server:
        usage = ask(server, system="Be brief.", messages=question(text(spaced, **FIVE_MINUTES))).usage

    assert usage.cache_creation_input_tokens == whole_blocks(f"<user>{DOCUMENT.strip()}")


def test_a_part_that_the_template_leaves_out_has_no_breakpoint() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}<user>{{ m.content }}{% endfor %}<assistant>"
    with serving(build("llama"), tables(num_slots=80), tokenizer=tokenizer) as server:
        done = ask(server, system=[text(DOCUMENT, **FIVE_MINUTES)], messages=question(text("Where?")))

    assert counts(done.usage)[:2] == (0, 0)
    assert Tier.HOST in done.kvtier["tokens"]
