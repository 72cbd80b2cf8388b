"""`Question`: the parts of a request's body by which the router chooses a replica."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from kvtier.web.api_keys import ApiKeys, effective_salt

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASKING = frozenset({COMPLETIONS, CHAT, MESSAGES, RESPONSES})  # paths of requests with a prompt, which may be repeated

SESSION_HEADER = "x-session-id"
CREDENTIALS = ("authorization", "x-api-key")  # OpenAI's and Anthropic's
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_SESSION_FIELDS = ("prompt_cache_key", "conversation", "user")
# A body beyond these limits is not parsed; its bytes are compared instead. Parsing 64 MiB of token ids takes 14 s, in
# which no other request is answered.
MAX_READ_BYTES = 8 << 20
MAX_VALUES = 1 << 18  # numbers, texts and objects, counted by the commas between them
_MAX_MESSAGES = 4096  # an Anthropic request with more messages is not tokenized
_MAX_SESSION = 1024  # characters of a conversation's name that are compared


_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class Question:
    """The prompt of a request, before it is tokenized.

    *text* is the whole prompt as bytes. In a conversation, the text of the next turn begins with the text of this turn.
    *session* is a digest of the conversation's name, or None if it has no name. *tokenize* is the body of the request
    to a replica's `/tokenize`, or None if that route cannot tokenize the prompt.
    """

    text: bytes
    model: str | None = None
    salt: str | None = None
    session: bytes | None = None
    token_ids: Sequence[int] | None = None
    tokenize: Mapping[str, object] | None = None


def may_repeat(method: str, path: str) -> bool:
    """Return whether a request may be sent to another replica after one replica may have executed it."""
    return method in _SAFE or path in ASKING


def read_question(path: str, body: bytes, session: str | None, who: str) -> Question | None:
    """Return the prompt in the *body* of a request to *path*, or None if there is no prompt to look up.

    The prompt is not looked up if it may include a stored document, because only one replica has the document. If the
    body would take too long to parse, the whole body is used as the prompt's text.

    Args:
        path: The request's path.
        body: The request's body.
        session: The conversation's name in the headers, or None if the headers have none.
        who: The header with the client's credentials. It tells apart clients that use the same name for a conversation.
    """
    if path not in ASKING:
        return None
    if len(body) > MAX_READ_BYTES or body.count(b",") > MAX_VALUES:
        names_document = b'"document_id"' in body or b'"kvtier"' in body
        return None if names_document else Question(body, session=_session({}, session, who))
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(content, dict) or b'"document_id"' in body or content.get("kvtier"):
        return None  # the request may name a document, which only one replica has
    text, token_ids, tokenize = _PROMPTS[path](content)
    return Question(
        text,
        _text(content.get("model")),
        _text(content.get("cache_salt")),
        _session(content, session, who),
        token_ids,
        tokenize,
    )


_Prompt = tuple[bytes, Sequence[int] | None, Mapping[str, object] | None]


def _completion(content: Mapping[str, Any]) -> _Prompt:
    prompt = content.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # the first of several prompts decides
    if (token_ids := _token_ids(prompt)) is not None:
        return msgspec.json.encode(prompt), token_ids, None
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass"), None, _known(content, "model") | {"prompt": prompt}
    return msgspec.json.encode(prompt), None, None


def _chat(content: Mapping[str, Any]) -> _Prompt:
    tokenize = {**_known(content, "model", "messages", "tools", "chat_template_kwargs"), "add_generation_prompt": True}
    return _texts(content, "tools", "messages"), None, tokenize if content.get("messages") else None


def _messages(content: Mapping[str, Any]) -> _Prompt:
    """Return the prompt of a request to Anthropic's API, in which the system message is a separate field."""
    text = _texts(content, "tools", "system", "messages")
    messages, system = content.get("messages"), content.get("system")
    if content.get("tools") or not isinstance(messages, list) or len(messages) > _MAX_MESSAGES:
        return text, None, None
    system_messages = [{"role": "system", "content": system}] if system else []
    chat = [_plain(message) for message in [*system_messages, *messages]]
    if not chat or None in chat:
        return text, None, None
    return text, None, {**_known(content, "model", "chat_template_kwargs"), "messages": chat}


def _response(content: Mapping[str, Any]) -> _Prompt:
    return _texts(content, "tools", "instructions", "input"), None, None


_PROMPTS = {COMPLETIONS: _completion, CHAT: _chat, MESSAGES: _messages, RESPONSES: _response}


def _token_ids(prompt: object) -> list[int] | None:
    """Return *prompt* if it is a non-empty list of token ids, else None."""
    try:
        return msgspec.convert(prompt, list[_TokenId]) or None
    except msgspec.ValidationError:
        return None


def _known(content: Mapping[str, Any], *names: str) -> dict[str, object]:
    return {name: content[name] for name in names if content.get(name) is not None}


def _texts(content: Mapping[str, Any], *names: str) -> bytes:
    """Return the values of the fields in *names* as JSON, without the closing bracket of the last list.

    The bracket is left out so that the text of a longer conversation begins with the text of a shorter one.
    """
    return b"\n".join(msgspec.json.encode(content.get(name)) for name in names).removesuffix(b"]")


def _plain(message: object) -> object:
    """Convert an Anthropic message to OpenAI's chat format. Return None if it has anything other than text."""
    if not isinstance(message, dict):
        return None
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            return None
        content = [{"type": "text", "text": part.get("text")} for part in content]
    return {"role": role, "content": content}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _session(content: Mapping[str, Any], header: str | None, who: str) -> bytes | None:
    metadata = content.get("metadata")
    of_body = [content.get(name) for name in _SESSION_FIELDS]
    if isinstance(metadata, dict):
        of_body.append(metadata.get("user_id"))
    name = next((each for each in (header, *of_body) if isinstance(each, str) and each), None)
    if name is None:
        return None
    text = f"{len(who)} {who}{name[:_MAX_SESSION]}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


class Salts:
    """The salts that replicas put into the hashes of a request's blocks.

    If the replicas have API keys (*keys*), the salt depends on the tenant of the request's key. The router does not
    reject unknown keys, because the replica checks the key. If *is_strict* is true, tenants share no blocks.
    """

    def __init__(self, keys: ApiKeys | None, is_strict: bool) -> None:
        self._keys, self._is_strict = keys, is_strict

    def of(self, who: str, asked: str | None) -> str | None:
        """Return a request's salt. *who* is its header with credentials, *asked* is the `cache_salt` in its body."""
        if self._keys is None:
            return asked
        scheme, _, token = who.partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else who
        return effective_salt(self._keys.tenant_of(key), asked, self._is_strict)
