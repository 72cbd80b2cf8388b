"""What the connector reads of vLLM's requests and steps."""

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


class VllmBlockCopy(Protocol):
    """vLLM's `KVCacheBlockCopy`: a page that a worker copies to another one, of a block that two requests share in
    part."""

    @property
    def dst_block_id(self) -> int: ...


class VllmStep(Protocol):
    """vLLM's `SchedulerOutput`: what workers do to pages at the beginning of a step."""

    @property
    def new_block_ids_to_zero(self) -> Sequence[int] | None: ...
    @property
    def kv_cache_block_copies(self) -> Sequence[VllmBlockCopy] | None: ...


def overwritten_pages(step: VllmStep) -> set[int]:
    """Return the pages whose bytes of before may be gone when a worker's first hook of the step is called: vLLM's newer
    model runner changes pages before it, its older one after it."""
    copies = step.kv_cache_block_copies or ()
    return {*(step.new_block_ids_to_zero or ()), *(copy.dst_block_id for copy in copies)}
