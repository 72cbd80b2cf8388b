"""ChatImages: the images of one chat, which it puts into the chat's prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.engine.images.engine_images import Images
from kvtier.engine.images.image import numbered
from kvtier.server.chat_request import ChatRequest
from kvtier.server.documents.kept_prefixes import Breakpoint
from kvtier.server.images.fetcher import ImageFetcher
from kvtier.server.images.image_file import open_image, read_data_url
from kvtier.server.prompt import Prompt
from kvtier.server.service import Service
from kvtier.web.api_error import ApiError
from kvtier.web.api_keys import effective_salt


@dataclass(frozen=True, slots=True)
class ChatImages:
    """The images of one chat, whose files are all there."""

    urls: Sequence[str]  # in the order of the prompt
    files: Mapping[str, bytes]  # by URL, without data URLs
    images: Images
    max_pixels: int
    cache_salt: str | None

    def placed(self, prompt: Prompt) -> Prompt:
        """Decode the images and return the prompt with them. Call this in a tokenizer thread.

        Raises:
            ImageError: If an image cannot be used; the message says which.
            ImagesBusy: If images of other requests take too much memory.
        """
        opened = []
        for number, url in enumerate(self.urls, 1):
            with numbered(number, len(self.urls)):
                data = self.files[url] if url in self.files else read_data_url(url)
                opened.append(open_image(data, self.max_pixels))
        ready = self.images.prepare(prompt.token_ids, opened, self.cache_salt)
        assert ready.images is not None, "the chat has images"
        moved = [Breakpoint(ready.images.moved(each.num_tokens), each.ttl_s) for each in prompt.breakpoints]
        return replace(prompt, token_ids=ready.token_ids, breakpoints=moved, images=ready.images)


async def chat_images(service: Service, asked: ChatRequest, tenant: str | None) -> ChatImages | None:
    """Fetch the images of a chat that are at URLs, and return all of its images; None if the chat has none.

    Raises:
        ImageError: If the model sees no images, if there are too many, or if one cannot be fetched.
    """
    urls = asked.image_urls
    if not urls:
        return None
    config = service.llm.config
    images = service.llm.images
    images.check_count(len(urls))
    files = await ImageFetcher(config.images, config.server.max_body).fetch(urls)
    salt = effective_salt(tenant, asked.cache_salt, service.is_strict)
    return ChatImages(urls, files, images, config.images.max_pixels, salt)


def refuse_truncation(num_kept: int | None) -> None:
    """Raise ApiError 400 if a request with images asks to truncate its prompt to *num_kept* tokens."""
    if num_kept is not None:
        message = "a prompt with images cannot be truncated; leave truncate_prompt_tokens out"
        raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
