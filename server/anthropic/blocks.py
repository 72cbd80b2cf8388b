"""Content blocks of Anthropic's messages, and their conversion to the parts of a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from kvtier.engine.text.chat_template import PART_SEPARATOR
from kvtier.server.cache_control import CacheControl
from kvtier.server.chat_request import DocumentPart, Message, TextPart
from kvtier.server.tool_calls.past_call import CalledFunction, PastCall


class TextBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text. A client may send back a block of an answer unchanged."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None  # remarks about the text; ignored

    def parts(self) -> list[TextPart | DocumentPart]:
        """Return the block as parts of a chat's message."""
        return [TextPart(self.text, self.cache_control)]


class TextSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A document's plain text."""

    data: str
    media_type: Literal["text/plain"] = "text/plain"


class ContentSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """A document that consists of text blocks."""

    content: str | list[TextBlock]


class FileSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="file"):
    """A document stored with `/v1/kvtier/documents`. *file_id* is its id there."""

    file_id: str


class _Unsupported(msgspec.Struct, frozen=True, tag_field="type"):
    """Content that is always refused, with the reason *why*."""

    why: ClassVar[str]

    def __post_init__(self) -> None:
        raise ValueError(self.why)

    def parts(self) -> list[TextPart | DocumentPart]:
        """Raise NotImplementedError, because such a block cannot be created."""
        raise NotImplementedError


class Base64Source(_Unsupported, frozen=True, tag="base64"):
    """A PDF in the request."""

    why = "PDFs are not supported; send the text as a source of type text"


class UrlSource(_Unsupported, frozen=True, tag="url"):
    """A PDF at a URL."""

    why = "URLs are not supported; send the text as a source of type text"


class Citations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the answer should cite the document, which kvtier does not support."""

    enabled: bool = False

    def __post_init__(self) -> None:
        if self.enabled:
            raise ValueError("citations are not supported; leave them out")


class DocumentBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="document"):
    """A document. Its title and its context, if any, precede its text."""

    source: TextSource | ContentSource | FileSource | Base64Source | UrlSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None

    def parts(self) -> list[TextPart | DocumentPart]:
        """Return the block as parts of a chat's message.

        A stored document is a part of its own, so that its text is unchanged, and hits the blocks computed ahead.
        """
        before = [text for text in (self.title, self.context) if text]
        match self.source:
            case FileSource(file_id):
                return [*map(TextPart, before), DocumentPart(file_id, self.cache_control)]
            case TextSource(data):
                texts = [data]
            case ContentSource(str(text)):
                texts = [text]
            case ContentSource(list(blocks)):
                texts = [block.text for block in blocks]
        return [TextPart(PART_SEPARATOR.join([*before, *texts]), self.cache_control)]


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """A model's thoughts before an earlier answer, which go to templates that take thoughts."""

    thinking: str = ""

    def parts(self) -> list[TextPart | DocumentPart]:
        """Return no parts, because thoughts become a field of the message."""
        return []


class RedactedThinkingBlock(ThinkingBlock, frozen=True, tag="redacted_thinking"):
    """Encrypted thoughts, which no template can use."""


class ImageBlock(_Unsupported, frozen=True, tag="image"):
    """An image."""

    why = "images are not supported, because the model reads only text; send the image's text"


class SearchResultBlock(_Unsupported, frozen=True, tag="search_result"):
    """The result of a search."""

    why = "search results are not supported; send them as documents"


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the model made in an earlier answer. Unknown fields are ignored."""

    id: str
    name: str
    input: dict[str, Any] = {}
    cache_control: CacheControl | None = None

    def parts(self) -> list[TextPart | DocumentPart]:
        """Return no parts, because the block becomes a call of the message."""
        return []

    def call(self) -> PastCall:
        """Return the block as a tool call of a chat's message."""
        return PastCall(self.id, CalledFunction(self.name, self.input))


ResultBlock: TypeAlias = TextBlock | DocumentBlock | ImageBlock | SearchResultBlock


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a tool. *is_error* is ignored, because templates have no field for it."""

    tool_use_id: str
    content: str | list[ResultBlock] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None

    def parts(self) -> list[TextPart | DocumentPart]:
        """Return no parts, because the block becomes a message of its own."""
        return []

    def message(self) -> Message:
        """Return the block as a chat's message with the role tool."""
        return Message("tool", [*parts_of(self.content)], self.cache_control, tool_call_id=self.tool_use_id)


Block: TypeAlias = (
    TextBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ImageBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
)
Blocks: TypeAlias = str | Annotated[list[Block], msgspec.Meta(min_length=1)]


def blocks_of(content: Blocks) -> Sequence[Block]:
    """Return the blocks of a message with this content."""
    return [TextBlock(content)] if isinstance(content, str) else content


def parts_of(content: str | Sequence[Block]) -> list[TextPart | DocumentPart]:
    """Return the parts of a chat's message with this content."""
    return [TextPart(content)] if isinstance(content, str) else [part for block in content for part in block.parts()]
