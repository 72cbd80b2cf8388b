"""OPERATIONS: descriptions of all operations of the server, in the order in which the page at `/docs` shows them."""

from typing import Annotated, Any, Literal

import msgspec

from kvtier.engine.observability.explain.explanation_object import ExplanationList
from kvtier.server import answers
from kvtier.server.anthropic import messages_request
from kvtier.server.anthropic.messages_request import Conversation, MessagesRequest
from kvtier.server.chat_request import CHAT_NEUTRAL, ChatRequest
from kvtier.server.completion_request import COMPLETION_IGNORED, CompletionRequest
from kvtier.server.document_routes import PinRequest, PutRequest
from kvtier.server.explain_routes import ExplainRequest
from kvtier.server.generation_request import IGNORED, NEUTRAL
from kvtier.server.openapi.operation import EVENTS, JSON, TEXT, Body, Operation, Outcome
from kvtier.server.responses import responses_request
from kvtier.server.responses.response_object import ResponseDeleted, ResponseObject
from kvtier.server.responses.responses_request import ResponsesRequest
from kvtier.server.tokenize_routes import Detokenize, TokenizeChat, TokenizeCompletion
from kvtier.web.dashboard.assets import ASSETS, PAGE, REASONS, ROOT
from kvtier.web.dashboard.routes import HistoryStretch
from kvtier.web.operating import verbs
from kvtier.web.paths import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    DOCS,
    DOCUMENTS,
    DOWNLOADS,
    EXPLAIN,
    HEALTH,
    HISTORY,
    MESSAGES,
    METRICS,
    MODELS,
    OPENAPI,
    OPERATE,
    READY,
    RESPONSES,
    STATS,
    STREAM,
    TOKENIZE,
    VERSION,
)

_OF_A_BODY = (400, 408, 413)
_GENERATED = (*_OF_A_BODY, 404, 429, 503)
_RANGE = {"range": Annotated[float, msgspec.Meta(ge=1, le=366 * 86_400, description="length in seconds, up to now")]}
_DOCUMENT = f"{DOCUMENTS}/{{id}}"


def _json(what: str, kind: object) -> Outcome:
    return Outcome(what, {JSON: kind})


def _answered(what: str, kind: object) -> dict[int, Outcome]:
    return {200: Outcome(what, {JSON: kind, EVENTS: None})}


_TOLD_OF_DOCUMENT = _json("the document, without its text", answers.DocumentObject)
_OPENAI = [
    Operation(
        "OpenAI",
        "POST",
        COMPLETIONS,
        "Continue prompts, or score them.",
        _answered("the continuations; with stream, their pieces as events", answers.CompletionAnswer),
        _GENERATED,
        Body([CompletionRequest], COMPLETION_IGNORED, NEUTRAL),
    ),
    Operation(
        "OpenAI",
        "POST",
        CHAT,
        "Answer a conversation.",
        _answered("the answers; with stream, their pieces as events", answers.ChatAnswer),
        _GENERATED,
        Body([ChatRequest], IGNORED, CHAT_NEUTRAL),
    ),
    Operation(
        "OpenAI",
        "POST",
        RESPONSES,
        "Answer a conversation, and store the response.",
        _answered("the response; with stream, its pieces as events", ResponseObject),
        _GENERATED,
        Body([ResponsesRequest], responses_request.IGNORED, responses_request.NEUTRAL),
    ),
    Operation(
        "OpenAI",
        "GET",
        f"{RESPONSES}/{{id}}",
        "Show a stored response.",
        {200: _json("the response", ResponseObject)},
        (400, 404),
    ),
    Operation(
        "OpenAI",
        "DELETE",
        f"{RESPONSES}/{{id}}",
        "Delete a stored response.",
        {200: _json("the response is deleted", ResponseDeleted)},
        (404,),
    ),
    Operation(
        "OpenAI", "GET", MODELS, "List the model and its adapters.", {200: _json("the models", answers.ModelList)}
    ),
    Operation(
        "OpenAI",
        "GET",
        f"{MODELS}/{{model}}",
        "Show one model.",
        {200: _json("the model", answers.ModelObject)},
        (404,),
    ),
]
_ANTHROPICS = [
    Operation(
        "Anthropic",
        "POST",
        MESSAGES,
        "Answer a conversation.",
        _answered("the answer; with stream, its pieces as events", answers.MessageAnswer),
        _GENERATED,
        Body([MessagesRequest], messages_request.IGNORED, messages_request.NEUTRAL),
    ),
    Operation(
        "Anthropic",
        "POST",
        COUNT_TOKENS,
        "Count the tokens of a conversation.",
        {200: _json("the number of tokens", answers.InputTokens)},
        (*_OF_A_BODY, 404, 503),
        Body([Conversation], messages_request.IGNORED, messages_request.NEUTRAL),
    ),
]
_TOKENS = [
    Operation(
        "tokens",
        "POST",
        TOKENIZE,
        "Convert a prompt to token ids.",
        {200: _json("the token ids", answers.Tokenized)},
        (*_OF_A_BODY, 404),
        Body([TokenizeCompletion, TokenizeChat]),
    ),
    Operation(
        "tokens",
        "POST",
        DETOKENIZE,
        "Convert token ids to text.",
        {200: _json("the text", answers.Detokenized)},
        (*_OF_A_BODY, 404),
        Body([Detokenize]),
    ),
]
_DOCUMENTS = [
    Operation(
        "documents",
        "GET",
        DOCUMENTS,
        "List documents.",
        {200: _json("the tenant's documents", answers.DocumentList)},
        (503,),
    ),
    Operation(
        "documents",
        "PUT",
        _DOCUMENT,
        "Store a document, and compute its KV cache before questions about it arrive.",
        {200: _TOLD_OF_DOCUMENT, 201: _json("the new document", answers.DocumentObject)},
        (*_OF_A_BODY, 404, 409, 503, 507),
        Body([PutRequest]),
    ),
    Operation("documents", "GET", _DOCUMENT, "Show a document.", {200: _TOLD_OF_DOCUMENT}, (404, 503)),
    Operation(
        "documents",
        "POST",
        f"{_DOCUMENT}/warm",
        "Load a document into a tier.",
        {202: _TOLD_OF_DOCUMENT},
        (400, 404, 503),
        query={"tier": Literal["host", "device"]},
    ),
    Operation(
        "documents",
        "POST",
        f"{_DOCUMENT}/pin",
        "Keep a document in host memory for a time.",
        {200: _TOLD_OF_DOCUMENT},
        (*_OF_A_BODY, 404, 503, 507),
        Body([PinRequest]),
    ),
    Operation(
        "documents",
        "DELETE",
        f"{_DOCUMENT}/pin",
        "End a document's pin.",
        {200: _TOLD_OF_DOCUMENT},
        (404, 503, 507),
    ),
    Operation(
        "documents",
        "DELETE",
        _DOCUMENT,
        "Delete a document.",
        {200: _json("the document is deleted", answers.DocumentDeleted)},
        (400, 404, 503, 507),
    ),
]
_EXPLAINED = [
    Operation(
        "explain",
        "GET",
        f"{EXPLAIN}/{{id}}",
        "Explain why a request's prompt hit or missed the cache.",
        {200: _json("an explanation for each choice", ExplanationList)},
        (404, 503),
    ),
    Operation(
        "explain",
        "POST",
        EXPLAIN,
        "Explain which part of a prompt would hit the cache now.",
        {200: _json("the explanation", ExplanationList)},
        (*_OF_A_BODY, 404, 409, 503),
        Body([ExplainRequest]),
    ),
]
_WATCHED = [
    Operation(
        "watching",
        "GET",
        HEALTH,
        "Check that the process is alive.",
        {200: _json("the process is alive", answers.ServerStatus)},
    ),
    Operation(
        "watching",
        "GET",
        READY,
        "Check whether the server is ready for requests.",
        {200: _json("ready", answers.ServerStatus), 503: _json("loading or shutting down", answers.ServerStatus)},
    ),
    Operation("watching", "GET", VERSION, "Show the version.", {200: _json("the version of kvtier", answers.Version)}),
    Operation("watching", "GET", METRICS, "Export metrics to Prometheus.", {200: Outcome("the metrics", {TEXT: None})}),
    Operation("watching", "GET", STATS, "Show all counters.", {200: _json("the counters", dict[str, Any])}),
    Operation(
        "watching", "GET", REASONS, "Explain why tokens are computed.", {200: Outcome("a page", {"text/html": None})}
    ),
    Operation("watching", "GET", ROOT, "Redirect to the dashboard.", {307: Outcome("the dashboard's address", {})}),
    Operation("watching", "GET", PAGE, "Show the dashboard.", {200: Outcome("a page", {"text/html": None})}),
    Operation(
        "watching",
        "GET",
        f"{ASSETS}/{{file}}",
        "Show a file of the dashboard.",
        {200: Outcome("the file", {"text/css": None, "text/javascript": None, "image/svg+xml": None})},
        (404,),
    ),
    Operation(
        "watching", "GET", STREAM, "Stream the dashboard's data.", {200: Outcome("events", {EVENTS: None})}, (503,)
    ),
    Operation(
        "watching",
        "GET",
        HISTORY,
        "Show the dashboard's data of a time range.",
        {200: _json("the data by column", HistoryStretch)},
        (400,),
        query=_RANGE,
    ),
    *(
        Operation(
            "watching",
            "GET",
            path,
            "Download the dashboard's data of a time range.",
            {200: Outcome("the file", {media_type: kind})},
            (400,),
            query=_RANGE,
        )
        for path, (media_type, kind) in zip(DOWNLOADS, (("text/csv", None), (JSON, HistoryStretch)), strict=True)
    ),
    Operation(
        "watching", "GET", OPENAPI, "Show this documentation to programs.", {200: _json("OpenAPI 3.1", dict[str, Any])}
    ),
    Operation(
        "watching", "GET", DOCS, "Show this documentation to people.", {200: Outcome("a page", {"text/html": None})}
    ),
]
_OPERATED = [
    Operation(
        "operating",
        "POST",
        f"{OPERATE}/{verb}",
        (kind.__doc__ or "").split("\n\n", maxsplit=1)[0],
        {200: _json("the command, and what it did in names and numbers", dict[str, Any])},
        (*_OF_A_BODY, 401, 404, 409, 503, 504, 507),
        Body([kind], is_required=False),
    )
    for verb, kind in verbs.KINDS.items()
]
OPERATIONS = [*_OPENAI, *_ANTHROPICS, *_TOKENS, *_DOCUMENTS, *_EXPLAINED, *_WATCHED, *_OPERATED]
