"""Items of a request to the Responses API, and their conversion to the messages of `/v1/chat/completions`.

The items of an answer that the client sends back become one message of the assistant.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from kvtier.server.chat_request import DocumentPart, ImagePart, ImageUrl, Message, Part, TextPart
from kvtier.server.responses.tools import CUSTOM_INPUT, full_name
from kvtier.server.tool_calls.past_call import CalledFunction, PastCall

Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """A text of the client."""

    text: str

    def part(self) -> Part:
        """Return the text as a part of a chat message."""
        return TextPart(self.text)


class OutputText(InputText, frozen=True, tag_field="type", tag="output_text"):
    """A text of an earlier answer."""


class RefusalText(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """A part of an earlier answer in which the model refused to help. It is treated as text."""

    refusal: str

    def part(self) -> Part:
        """Return the text as a part of a chat message."""
        return TextPart(self.refusal)


class InputFile(msgspec.Struct, frozen=True, tag_field="type", tag="input_file"):
    """A document that was stored with `/v1/kvtier/documents` and has the id *file_id*. Other files are refused."""

    file_id: Id | None = None

    def __post_init__(self) -> None:
        if self.file_id is None:
            raise ValueError("file_id: is missing; store the file's text as a document, and send the document's id")

    def part(self) -> Part:
        """Return the document as a part of a chat message."""
        assert self.file_id is not None, "__post_init__ requires it"
        return DocumentPart(self.file_id)


class _Unsupported(msgspec.Struct, frozen=True, tag_field="type"):
    """Content that the server always refuses. *why* is the error message."""

    why: ClassVar[str]

    def __post_init__(self) -> None:
        raise ValueError(self.why)

    def part(self) -> Part:
        raise NotImplementedError  # never called, because no such part can be created


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image, for models that see images: a data URL, or an https URL if the server allows its host.

    *detail* is ignored. Images that were uploaded before (*file_id*) are refused.
    """

    image_url: str | None = None
    detail: str | None = None
    file_id: Id | None = None

    def __post_init__(self) -> None:
        if self.image_url is None or self.file_id is not None:
            raise ValueError("file_id: images are not stored here; send the image in image_url, as a data URL")

    def part(self) -> Part:
        """Return the image as a part of a chat message."""
        assert self.image_url is not None, "__post_init__ requires it"
        return ImagePart(ImageUrl(self.image_url))


class InputAudio(_Unsupported, frozen=True, tag="input_audio"):
    """A recording. It is refused."""

    why = "audio is not supported, because the model reads only text; send the spoken text"


Content: TypeAlias = str | list[InputText | OutputText | RefusalText | InputFile | InputImage | InputAudio]


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message. A client may send back a message of an earlier answer unchanged; unknown fields are ignored."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def message(self) -> Message:
        """Return the item as a chat message."""
        role: Literal["user", "assistant", "system"] = "system" if self.role == "developer" else self.role
        return Message(role, _parts(self.content))


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A function call of an earlier answer. *arguments* is JSON text."""

    call_id: Id
    name: Id
    arguments: str = "{}"
    namespace: str | None = None

    def message(self) -> Message:
        """Return the item as a chat message of the assistant."""
        return _call(self.call_id, full_name(self.name, self.namespace), self.arguments)


class CustomCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool in an earlier answer. *input* is any text."""

    call_id: Id
    name: Id
    input: str = ""
    namespace: str | None = None

    def message(self) -> Message:
        """Return the item as a chat message of the assistant, as if the tool were a function with one argument."""
        arguments = msgspec.json.encode({CUSTOM_INPUT: self.input}).decode()
        return _call(self.call_id, full_name(self.name, self.namespace), arguments)


class FunctionOutputItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """The result of a function call."""

    call_id: Id
    output: Content

    def message(self) -> Message:
        """Return the item as a chat message with the role `tool`."""
        return Message("tool", _parts(self.output), tool_call_id=self.call_id)


class CustomOutputItem(FunctionOutputItem, frozen=True, tag_field="type", tag="custom_tool_call_output"):
    """The result of a call of a custom tool."""


class _Remark(msgspec.Struct, frozen=True, tag_field="type"):
    """An item that does not get into the prompt."""

    def message(self) -> None:
        """Return None, because the item is ignored."""


class ReasoningItem(_Remark, frozen=True, tag="reasoning"):
    """Thoughts before an earlier answer, which may be encrypted. They are ignored."""


class WebSearchItem(_Remark, frozen=True, tag="web_search_call"):
    """A web search that another server did for an earlier answer. It is ignored, because the answer has its result."""


class FileSearchItem(_Remark, frozen=True, tag="file_search_call"):
    """A file search that another server did for an earlier answer. It is ignored, because the answer has its result."""


Item: TypeAlias = (
    MessageItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | ReasoningItem
    | WebSearchItem
    | FileSearchItem
)


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Return *items* as chat messages.

    Consecutive messages of one role become one message, because some chat templates reject two of them in a row. Its
    parts are joined with a newline.
    """
    messages: list[Message] = []
    for message in (item.message() for item in items):
        if message is None:
            continue
        if messages and messages[-1].role == message.role != "tool":
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _parts(content: Content) -> list[Part]:
    return [TextPart(content)] if isinstance(content, str) else [part.part() for part in content]


def _call(call_id: str, name: str, arguments: str) -> Message:
    return Message("assistant", tool_calls=[PastCall(call_id, CalledFunction(name, arguments))])


def _joined(first: Message, second: Message) -> Message:
    calls: Sequence[PastCall] = [*(first.tool_calls or ()), *(second.tool_calls or ())]
    return msgspec.structs.replace(first, content=[*first.parts, *second.parts], tool_calls=[*calls] or None)
