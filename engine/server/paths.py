"""The server's paths, and what each of them is to keys, to the log and to metrics."""

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DOCUMENTS = "/v1/documents"
MODELS = "/v1/models"
HEALTH, READY, METRICS, VERSION = "/health", "/ready", "/metrics", "/version"

OPEN = frozenset({HEALTH, READY, VERSION})  # need no key: nothing in them is a tenant's
QUIET = frozenset({HEALTH, READY, METRICS})  # machines ask for them every few seconds
_NAMED = frozenset({COMPLETIONS, CHAT, DOCUMENTS, MODELS, HEALTH, READY, METRICS, VERSION})


def label_of(path: str) -> str:
    """What the log and the labels of metrics have in its place: a client could make up any number of others, and a
    document's id may say what it is about."""
    if path.startswith(f"{DOCUMENTS}/"):
        return f"{DOCUMENTS}/{{id}}"
    return path if path in _NAMED else "other"
