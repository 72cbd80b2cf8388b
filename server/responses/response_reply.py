"""ResponseReply: writes the answers of `/v1/responses`."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvtier.engine.async_engine import StreamChunk
from kvtier.engine.model.sampling_defaults import SamplingDefaults
from kvtier.engine.scheduling.request import Completion, FinishReason
from kvtier.server.reply import PADDED_BYTES, Answer
from kvtier.server.responses.item_stream import Event, ItemStream
from kvtier.server.responses.response_object import (
    IncompleteDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from kvtier.server.responses.responses_request import ResponsesRequest
from kvtier.server.tool_calls.tool_use import ToolUse
from kvtier.server.usage import Usage
from kvtier.web.api_error import ApiError
from kvtier.web.event_stream import named_event


class ResponseReply:
    """A `Reply` in the format of `/v1/responses`, which has one choice. Each event of a stream has a sequence number.

    *keep* is called with the complete response before the response is sent.
    """

    def __init__(
        self,
        asked: ResponsesRequest,
        response: ResponseObject,
        usage: Usage,
        tools: ToolUse,
        keep: Callable[[ResponseObject], None],
    ) -> None:
        """Create a reply to the request *asked*. *response* is the response in progress, without output."""
        self._response = response
        self._usage = usage
        self._tools = tools
        self._keep = keep
        self._is_padded = asked.stream_options is not None and asked.stream_options.include_obfuscation
        self._items = ItemStream(asked.named_tools)
        self._reader = tools.reader()
        self._num_events = 0

    def whole(self, answers: Sequence[Answer]) -> ResponseObject:
        (answer,) = answers
        for _ in self._read(answer.completion.text, answer.completion):
            pass  # collects the items; events are only for streams
        return self._finish(answer.completion)

    def events(self, index: int, piece: StreamChunk) -> Iterator[bytes]:
        if not self._num_events:
            yield self._written("response.created", {"response": self._response})
            yield self._written("response.in_progress", {"response": self._response})
        for kind, fields in self._read(piece.text, piece.completion):
            yield self._written(kind, fields)
        if piece.completion is not None:
            response = self._finish(piece.completion)
            yield self._written(f"response.{response.status}", {"response": response})

    def last_events(self) -> Iterator[bytes]:
        yield from ()

    def error_event(self, error: ApiError) -> bytes:
        failure = ResponseFailure("server_error" if error.status >= 500 else "invalid_prompt", str(error))
        response = msgspec.structs.replace(
            self._response, status="failed", error=failure, output=[*self._items.output], usage=None
        )
        return self._written("response.failed", {"response": response})

    def _read(self, text: str, done: Completion | None) -> Iterator[Event]:
        """Yield the events for the answer's next *text*; if *done*, also those at its end."""
        yield from self._items.events(self._reader.push(text))
        if done is not None:
            yield from self._items.events(self._reader.end())
            yield from self._items.last_events(is_cut_off=_is_cut_off(done))

    def _finish(self, done: Completion) -> ResponseObject:
        """Return the complete response, after *keep* was called with it."""
        is_cut_off = _is_cut_off(done)
        response = msgspec.structs.replace(
            self._response,
            completed_at=int(time.time()),
            status="incomplete" if is_cut_off else "completed",
            incomplete_details=IncompleteDetails() if is_cut_off else None,
            output=[*self._items.output],
            usage=ResponseUsage.of(self._usage),
            kvtier=self._usage.kvtier(),
        )
        self._keep(response)
        return response

    def _written(self, kind: str, fields: dict[str, object]) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        if self._is_padded and "delta" in fields:
            num_missing = PADDED_BYTES - len(msgspec.json.encode(fields["delta"])) % PADDED_BYTES
            content["obfuscation"] = secrets.token_urlsafe(num_missing)[:num_missing]
        return named_event(kind, content)


def new_response(asked: ResponsesRequest, response_id: str, defaults: SamplingDefaults) -> ResponseObject:
    """Return a response in progress to the request *asked*, without output.

    Args:
        asked: The request.
        response_id: The response's id.
        defaults: The model's values for parameters that the request leaves out.
    """
    temperature = defaults.temperature if asked.temperature is None else asked.temperature
    top_p = defaults.top_p if asked.top_p is None else asked.top_p
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata,
        model=asked.model,
        output=[],
        parallel_tool_calls=asked.parallel_tool_calls,
        previous_response_id=asked.previous_response_id,
        reasoning={"effort": asked.reasoning.effort, "summary": None},
        store=asked.store,
        temperature=1.0 if temperature is None else temperature,
        text=msgspec.to_builtins(asked.text),
        tool_choice=msgspec.to_builtins(asked.tool_choice),
        tools=msgspec.to_builtins(asked.tools),
        top_p=1.0 if top_p is None else top_p,
    )


def _is_cut_off(done: Completion) -> bool:
    return done.finish_reason is FinishReason.LENGTH
