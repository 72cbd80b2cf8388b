"""EngineImages: an engine's images: their preparation, the encoder, and the places where its results are kept."""

import hashlib
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from kvtier.engine.images.encoder import ImageEncoder
from kvtier.engine.images.image import ImageError, PreparedImage, numbered
from kvtier.engine.images.image_prompt import PreparedPrompt
from kvtier.engine.images.preparer import ImagePreparer
from kvtier.engine.images.prompt_images import PromptImages
from kvtier.engine.images.row_cache import RowCache
from kvtier.engine.images.row_tier import RowTier
from kvtier.engine.model.image_rows import ImageRows
from kvtier.tiers.naming.block_hash import Lora
from kvtier.tiers.naming.named_blocks import tenant_of

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class ImageStatistics:
    """Counters of an engine's images. Each use of an image's rows counts as one of the first three."""

    num_encoded: int  # runs of the encoder
    num_from_host: int  # results of the encoder found in host memory
    num_from_disk: int  # results read from disk or from the sidecar
    encoding_s: float  # time in the encoder
    cached_bytes: int  # of the encoder's results in host memory
    waiting_bytes: int  # of decoded images that are in use or wait


@dataclass(eq=False, slots=True)
class ImageUse:
    """The images of one request while it runs. Owned by the engine's thread.

    The rows of an image that a chunk has cut stay in *held* until the next chunk, so that they are not lost if the
    cache is too small for them.
    """

    images: PromptImages
    cache_salt: str | None
    held: dict[int, torch.Tensor] = field(default_factory=dict)  # by index of the image


class Images(Protocol):
    """The image part of an engine, or the reason why it has none."""

    def prepare(self, token_ids: Sequence[int], images: Sequence["Image"], cache_salt: str | None) -> PreparedPrompt:
        """Return the tokens of a prompt with images.

        Any thread may call this. It decodes the images and may read from disk, so an engine that serves several callers
        does not call it in its own thread.

        Raises:
            ImageError: If the model sees no images, or if these cannot be used.
            ImagesBusy: If images of other prompts take too much memory.
        """

    def check_count(self, num_images: int) -> None:
        """Raise `ImageError` if the model sees no images, or if a prompt may not have so many."""

    @property
    def has_room(self) -> bool:
        """True if the images of another prompt may be prepared now."""

    def check_adapter(self, lora: Lora | None) -> None:
        """Raise `ImageError` if a prompt with images cannot use this adapter."""

    def rows(self, use: ImageUse, start: int, end: int) -> ImageRows | None:
        """Return what a chunk with the tokens *start* to *end* - 1 needs besides its tokens; None if nothing."""

    def statistics(self) -> ImageStatistics | None:
        """Return the counters; None if the engine has no images."""

    def clear(self) -> None:
        """Evict the encoder's results from host memory and disk."""

    def flush(self) -> None:
        """Wait until the encoder's results that are queued for a lower tier are written, at most a few seconds."""

    def close(self) -> None:
        """End what the image part has started."""


@dataclass(frozen=True, slots=True)
class NoImages:
    """The image part of an engine whose model sees no images, or cannot be used with them. *why* is the reason."""

    why: str
    has_room: bool = True

    def prepare(self, token_ids: Sequence[int], images: Sequence["Image"], cache_salt: str | None) -> PreparedPrompt:
        self.check_count(len(images))
        return PreparedPrompt(token_ids)

    def check_count(self, num_images: int) -> None:
        if num_images:
            raise ImageError(self.why)

    def check_adapter(self, lora: Lora | None) -> None:
        pass

    def rows(self, use: ImageUse, start: int, end: int) -> ImageRows | None:
        raise ImageError(self.why)

    def statistics(self) -> ImageStatistics | None:
        return None

    def clear(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class EngineImages:
    """The images of an engine whose model sees images.

    An image is encoded when a chunk first covers one of its tokens. The result is kept in host memory and on disk under
    the image's identity and the prompt's cache salt, so that tenants share nothing.
    """

    def __init__(
        self,
        preparer: ImagePreparer,
        encoder: ImageEncoder,
        cache: RowCache,
        store: RowTier | None,
        row_shape: tuple[int, int],
        dtype: torch.dtype,
        adapters_of_encoder: Collection[Lora] = (),
    ) -> None:
        """Create the image part.

        *row_shape* is (1 + num_deep, hidden) of the encoder's rows. *adapters_of_encoder* are the adapters that would
        change them.
        """
        self._preparer = preparer
        self._encoder = encoder
        self._cache = cache
        self._store = store
        self._row_shape = row_shape
        self._dtype = dtype
        self._adapters_of_encoder = adapters_of_encoder
        self._lock = threading.Lock()  # guards the next one
        self._num_from_disk = 0
        self._num_encoded = self._num_from_host = 0
        self._encoding_s = 0.0

    @property
    def image_token_id(self) -> int:
        """The token that stands for an image in a prompt."""
        return self._preparer.image_token_id

    @property
    def has_room(self) -> bool:
        return self._preparer.has_room

    def check_count(self, num_images: int) -> None:
        self._preparer.check_count(num_images)

    def prepare(self, token_ids: Sequence[int], images: Sequence["Image"], cache_salt: str | None) -> PreparedPrompt:
        if not images:
            return PreparedPrompt(token_ids)
        self.check_count(len(images))
        self._preparer.check_room()
        prepared = []
        for number, image in enumerate(images, 1):
            with numbered(number, len(images)):
                prepared.append(self._preparer.prepare(image))
        for each in prepared:
            self._fetch(each, cache_salt)
        return self._preparer.place(token_ids, prepared)

    def check_adapter(self, lora: Lora | None) -> None:
        if lora is not None and lora in self._adapters_of_encoder:
            raise ImageError(
                f"lora {lora.name}: the adapter changes the image encoder, and kvtier applies adapters only behind it; "
                "leave the images out, or use an adapter of the text layers"
            )

    def rows(self, use: ImageUse, start: int, end: int) -> ImageRows | None:
        places: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for number, placed in enumerate(use.images.placed):
            within = placed.rows_in(start, end)
            if not within:
                continue
            rows = use.held.pop(number, None)
            if rows is None:
                rows = self._rows_of(placed.image, use.cache_salt)
            if within.stop < placed.image.num_rows:
                use.held[number] = rows
            places.append(torch.from_numpy(placed.places[within.start : within.stop]) - start)
            parts.append(rows[:, within.start : within.stop])
        positions = use.images.positions(start, end)
        if not parts:
            return (
                None if positions is None else ImageRows(torch.empty(0, dtype=torch.int64), torch.empty(0), positions)
            )
        return ImageRows(torch.cat(places), torch.cat(parts, dim=1), positions)

    def statistics(self) -> ImageStatistics:
        return ImageStatistics(
            self._num_encoded,
            self._num_from_host,
            self._num_from_disk,
            self._encoding_s,
            self._cache.num_bytes,
            self._preparer.num_bytes,
        )

    def clear(self) -> None:
        self._cache.clear()
        if self._store is not None:
            self._store.clear()

    def flush(self) -> None:
        if self._store is not None:
            self._store.flush()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _fetch(self, image: PreparedImage, cache_salt: str | None) -> None:
        """Load the image's rows from disk or sidecar into the cache, if they are there and not in the cache."""
        key = _key(image, cache_salt)
        if self._store is None or self._cache.get(key) is not None:
            return
        depth, width = self._row_shape
        rows = self._store.read(key, (depth, image.num_rows, width), self._dtype, tenant_of(cache_salt))
        if rows is not None:
            self._cache.put(key, rows)
            with self._lock:
                self._num_from_disk += 1

    def _rows_of(self, image: PreparedImage, cache_salt: str | None) -> torch.Tensor:
        key = _key(image, cache_salt)
        if (rows := self._cache.get(key)) is not None:
            self._num_from_host += 1
            return rows
        began_at = time.monotonic()
        rows = self._encoder.encode(image)
        self._encoding_s += time.monotonic() - began_at
        self._num_encoded += 1
        self._cache.put(key, rows)
        if self._store is not None:
            self._store.write(key, rows, tenant_of(cache_salt))
        return rows


def _key(image: PreparedImage, cache_salt: str | None) -> bytes:
    """Return the key of an image's rows for prompts with this salt, 32 bytes."""
    salt = b"" if cache_salt is None else b"1" + cache_salt.encode()
    return hashlib.sha256(len(salt).to_bytes(8, "little") + salt + image.identity.encode()).digest()
