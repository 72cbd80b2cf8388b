"""The URL paths of the servers, sets of paths (such as those that need no API key), and labels for metrics."""

from kvtier.web.dashboard.assets import ASSETS, PAGE, REASONS, ROOT

STREAM, HISTORY = f"{PAGE}/stream", f"{PAGE}/history"
DOWNLOADS = (f"{PAGE}/download.csv", f"{PAGE}/download.json")
DATA_PATHS = frozenset({STREAM, HISTORY, *DOWNLOADS})
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
RESPONSES = "/v1/responses"
MODELS = "/v1/models"
KVTIER = "/v1/kvtier"  # prefix of routes that only kvtier has
DOCUMENTS, STATS = f"{KVTIER}/documents", f"{KVTIER}/stats"
EXPLAIN, OPERATE = f"{KVTIER}/explain", f"{KVTIER}/operate"
HEALTH, READY, METRICS, VERSION = "/health", "/ready", "/metrics", "/version"
OPENAPI, DOCS = "/openapi.json", "/docs"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"  # same as in vLLM

PROBES = frozenset({HEALTH, READY, VERSION})  # allowed under any host name, because monitoring may use any
OPEN = frozenset({*PROBES, ROOT, PAGE, REASONS, OPENAPI, DOCS})  # need no key: no data of a tenant
OF_ALL = frozenset({METRICS, STATS, *DATA_PATHS})  # responses with data of all tenants
QUIET = frozenset({HEALTH, READY, METRICS, PAGE, *DATA_PATHS})  # polled, so logged only at level debug and not traced
_NAMED = frozenset(
    {
        COMPLETIONS,
        CHAT,
        MESSAGES,
        COUNT_TOKENS,
        RESPONSES,
        TOKENIZE,
        DETOKENIZE,
        DOCUMENTS,
        MODELS,
        EXPLAIN,
        HEALTH,
        READY,
        VERSION,
        PAGE,
        OPENAPI,
        DOCS,
        *OF_ALL,
    }
)


def is_open(path: str) -> bool:
    """Return whether *path* needs no API key."""
    return path in OPEN or path.startswith(f"{ASSETS}/")


def is_anthropics(path: str) -> bool:
    """Return whether *path* belongs to Anthropic's API, whose errors and headers differ from those of OpenAI's API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def label_of(path: str) -> str:
    """Return the label that stands for *path* in the log and in metrics.

    The path itself is not used, because a document's id in it may reveal the document's content. Clients could
    also create any number of labels in the metrics by sending different paths.
    """
    for named in (DOCUMENTS, EXPLAIN, RESPONSES):
        if path.startswith(f"{named}/"):
            return f"{named}/{{id}}"
    if path.startswith(f"{ASSETS}/") or path == REASONS:
        return PAGE
    if path.startswith(f"{OPERATE}/"):
        return f"{OPERATE}/{{verb}}"
    return path if path in _NAMED else "other"
