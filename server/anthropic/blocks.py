"""Content blocks of Anthropic's messages, and their conversion to the message parts of `/v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from kvtier.engine.text.chat_template import PART_SEPARATOR
from kvtier.server.cache_control import CacheControl
from kvtier.server.chat_request import DocumentPart, ImagePart, ImageUrl, Message, Part, TextPart
from kvtier.server.tool_calls.past_call import CalledFunction, PastCall


class TextBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text. A client may send back a text block of an earlier answer unchanged."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None  # remarks about the text; ignored

    def parts(self) -> list[Part]:
        """Return the block as parts of a chat message."""
        return [TextPart(self.text, self.cache_control)]


class TextSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A document's plain text."""

    data: str
    media_type: Literal["text/plain"] = "text/plain"


class ContentSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """A document that consists of text blocks."""

    content: str | list[TextBlock]


class FileSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="file"):
    """A document that was stored with `/v1/kvtier/documents` and has the id *file_id*."""

    file_id: str


class _Unsupported(msgspec.Struct, frozen=True, tag_field="type"):
    """Content that the server always refuses. *why* is the error message."""

    why: ClassVar[str]

    def __post_init__(self) -> None:
        raise ValueError(self.why)

    def parts(self) -> list[Part]:
        raise NotImplementedError  # never called, because no such block can be created


class Base64Source(_Unsupported, frozen=True, tag="base64"):
    """A PDF inside the request. It is refused."""

    why = "PDFs are not supported; send the text as a source of type text"


class UrlSource(_Unsupported, frozen=True, tag="url"):
    """A PDF at a URL. It is refused."""

    why = "URLs are not supported; send the text as a source of type text"


class Citations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to cite the document in the answer. kvtier does not support this."""

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

    def parts(self) -> list[Part]:
        """Return the block as parts of a chat message.

        A stored document becomes a separate part, so that its text stays as it was stored, and the request hits the
        document's cached KV blocks.
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
    """The model's thoughts before an earlier answer. Some chat templates include them in the prompt."""

    thinking: str = ""

    def parts(self) -> list[Part]:
        """Return an empty list, because the thoughts are put into a field of the chat message."""
        return []


class RedactedThinkingBlock(ThinkingBlock, frozen=True, tag="redacted_thinking"):
    """Encrypted thoughts. They are ignored, because no template can use them."""


class Base64Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    """The file of an image, in base64."""

    data: str
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="url"):
    """An image at an https URL, if the server allows its host."""

    url: str


class ImageBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image"):
    """An image, for models that see images."""

    source: Base64Image | UrlImage
    cache_control: CacheControl | None = None

    def parts(self) -> list[Part]:
        """Return the block as parts of a chat message."""
        return [ImagePart(ImageUrl(self.source.url), self.cache_control)]


class SearchResultBlock(_Unsupported, frozen=True, tag="search_result"):
    """The result of a search. It is refused."""

    why = "search results are not supported; send them as documents"


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A tool call of an earlier answer. Unknown fields are ignored."""

    id: str
    name: str
    input: dict[str, Any] = {}
    cache_control: CacheControl | None = None

    def parts(self) -> list[Part]:
        """Return an empty list, because the block becomes a tool call of the chat message, see `call`."""
        return []

    def call(self) -> PastCall:
        """Return the block as a tool call of a chat message."""
        return PastCall(self.id, CalledFunction(self.name, self.input))


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """The name of a tool that a search among the tools has found. It is treated as text.

    Anthropic's servers put the found tool into the prompt. kvtier's prompts already contain all tools of the request.
    """

    tool_name: str
    cache_control: CacheControl | None = None

    def parts(self) -> list[Part]:
        """Return the block as parts of a chat message."""
        return [TextPart(self.tool_name, self.cache_control)]


ResultBlock: TypeAlias = TextBlock | DocumentBlock | ToolReferenceBlock | ImageBlock | SearchResultBlock


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a tool call. *is_error* is ignored, because chat templates have no field for it."""

    tool_use_id: str
    content: str | list[ResultBlock] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None

    def parts(self) -> list[Part]:
        """Return an empty list, because the block becomes a separate chat message, see `message`."""
        return []

    def message(self) -> Message:
        """Return the block as a chat message with the role `tool`."""
        return Message("tool", [*parts_of(self.content)], self.cache_control, tool_call_id=self.tool_use_id)


Block: TypeAlias = (
    TextBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolReferenceBlock
    | ImageBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
)
Blocks: TypeAlias = str | Annotated[list[Block], msgspec.Meta(min_length=1)]


def blocks_of(content: Blocks) -> Sequence[Block]:
    """Return the *content* of a message as blocks. A string becomes one text block."""
    return [TextBlock(content)] if isinstance(content, str) else content


def parts_of(content: str | Sequence[Block]) -> list[Part]:
    """Return the *content* of a message as parts of a chat message."""
    return [TextPart(content)] if isinstance(content, str) else [part for block in content for part in block.parts()]
