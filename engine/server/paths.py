"""The paths of the server, which of them need no key, and what the log and metrics call them."""

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DOCUMENTS = "/v1/documents"
MODELS = "/v1/models"
OPERATE = "/v1/kvtier/operate"
HEALTH, READY, METRICS, VERSION = "/health", "/ready", "/metrics", "/version"

OPEN = frozenset({HEALTH, READY, VERSION})  # need no key: their answers have nothing of a tenant's
QUIET = frozenset({HEALTH, READY, METRICS})  # machines ask for them every few seconds
_NAMED = frozenset({COMPLETIONS, CHAT, DOCUMENTS, MODELS, HEALTH, READY, METRICS, VERSION})


def label_of(path: str) -> str:
    """What the log and the labels of metrics say in place of *path*.

    A client could make up any number of paths, and the id of a document may say what the document is about.
    """
    if path.startswith(f"{DOCUMENTS}/"):
        return f"{DOCUMENTS}/{{id}}"
    if path.startswith(f"{OPERATE}/"):
        return f"{OPERATE}/{{verb}}"
    return path if path in _NAMED else "other"
