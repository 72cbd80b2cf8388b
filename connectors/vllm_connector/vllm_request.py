"""The attributes of vLLM's requests and steps that the connector reads."""

from collections.abc import Sequence
from typing import Protocol

Pages = Sequence[Sequence[int]]  # [group] vLLM's ids of a request's blocks
NULL_PAGE = 0  # vLLM's placeholder for a block that the sliding window has passed


class VllmAdapter(Protocol):
    """vLLM's `LoRARequest`. *lora_int_id* is the adapter's number in this engine, *lora_path* a folder or a hub id."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_int_id(self) -> int: ...
    @property
    def lora_path(self) -> str: ...


class VllmRequest(Protocol):
    """vLLM's `Request` in its scheduler.

    *block_hashes* has one hash for each full block of vLLM's smallest block size, and only grows. The hashes cover
    tokens, salts, images and the adapter's name, but not the adapter's weights.
    """

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
    """vLLM's `KVCacheBlockCopy`: a copy of one page to another, for requests that share only a part of a page."""

    @property
    def dst_block_id(self) -> int: ...


class VllmStep(Protocol):
    """The part of vLLM's `SchedulerOutput` that lists the pages that workers change at the start of a step."""

    @property
    def new_block_ids_to_zero(self) -> Sequence[int] | None: ...
    @property
    def kv_cache_block_copies(self) -> Sequence[VllmBlockCopy] | None: ...


def overwritten_pages(step: VllmStep) -> set[int]:
    """Return the pages that vLLM zeroes or copies over in a step, which it may do before the worker stores them.

    vLLM's newer model runner does so before it calls the connector in the worker, the older one afterwards.
    """
    copies = step.kv_cache_block_copies or ()
    return {*(step.new_block_ids_to_zero or ()), *(copy.dst_block_id for copy in copies)}
