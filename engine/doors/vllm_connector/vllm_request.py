"""What the connector reads of vLLM's requests."""

from collections.abc import Sequence
from typing import Protocol

Pages = Sequence[Sequence[int]]  # [group] vLLM's ids of the blocks of a request
NULL_PAGE = 0  # vLLM's, in the place of a block that a window has passed


class VllmAdapter(Protocol):
    """vLLM's `LoRARequest`. *lora_int_id* is its number in this engine, *lora_path* a folder or the id of a hub."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_int_id(self) -> int: ...
    @property
    def lora_path(self) -> str: ...


class VllmRequest(Protocol):
    """vLLM's `Request` in its scheduler. *block_hashes* has one for each full block of the finest size; it only grows.
    Salts, images and the adapter's name are in them, its weights are not."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def lora_request(self) -> VllmAdapter | None: ...
    @property
    def cache_salt(self) -> str | None: ...
