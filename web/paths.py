"""The paths of the server, which of them need no key, and what the log and metrics call them."""

from kvtier.web.dashboard.assets import ASSETS, PAGE

STREAM, HISTORY = f"{PAGE}/stream", f"{PAGE}/history"
DOWNLOADS = (f"{PAGE}/download.csv", f"{PAGE}/download.json")
DATA_PATHS = frozenset({STREAM, HISTORY, *DOWNLOADS})
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
MODELS = "/v1/models"
KVTIER = "/v1/kvtier"  # below it is what no other server has
DOCUMENTS, STATS = f"{KVTIER}/documents", f"{KVTIER}/stats"
EXPLAIN, OPERATE = f"{KVTIER}/explain", f"{KVTIER}/operate"
OLD_DOCUMENTS, OLD_STATS = "/v1/documents", "/stats"  # the same, where they were before
HEALTH, READY, METRICS, VERSION = "/health", "/ready", "/metrics", "/version"
OPENAPI, DOCS = "/openapi.json", "/docs"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"  # as vLLM has them

PROBES = frozenset({HEALTH, READY, VERSION})  # asked by machines under any name of this one
OPEN = frozenset({*PROBES, PAGE, OPENAPI, DOCS})  # need no key: their answers have nothing of a tenant's
OF_ALL = frozenset({METRICS, STATS, OLD_STATS, *DATA_PATHS})  # count all tenants together
QUIET = frozenset({HEALTH, READY, METRICS, PAGE, *DATA_PATHS})  # machines and pages ask for them again and again
_NAMED = frozenset(
    {
        COMPLETIONS,
        CHAT,
        MESSAGES,
        COUNT_TOKENS,
        TOKENIZE,
        DETOKENIZE,
        DOCUMENTS,
        OLD_DOCUMENTS,
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
    """Whether *path* needs no key."""
    return path in OPEN or path.startswith(f"{ASSETS}/")


def is_anthropics(path: str) -> bool:
    """Whether *path* is of Anthropic's API, whose errors and headers are its own."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def label_of(path: str) -> str:
    """What the log and the labels of metrics say in place of *path*.

    A client could make up any number of paths, and the id of a document may say what the document is about.
    """
    for named in (DOCUMENTS, OLD_DOCUMENTS, EXPLAIN):
        if path.startswith(f"{named}/"):
            return f"{named}/{{id}}"
    if path.startswith(f"{ASSETS}/"):
        return PAGE
    if path.startswith(f"{OPERATE}/"):
        return f"{OPERATE}/{{verb}}"
    return path if path in _NAMED else "other"
