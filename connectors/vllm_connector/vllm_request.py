"""The attributes of vLLM's requests and steps that the connector reads."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
    tokens, salts, images and the adapter's name, but not the adapter's weights. vLLM keeps the recurrent state after
    *shared_prefix_boundary* tokens, which it sets itself before it asks the connector.
    """

    shared_prefix_boundary: int

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


class VllmBlockState(Protocol):
    """vLLM's `KVConnectorBlockState`: the pages of a step's requests.

    *boundary_state_offloads* names the pages of recurrent states that a connector may store, by request: the group, the
    page, and the number of tokens after which the page has the state once the step has ended.
    """

    @property
    def boundary_state_offloads(self) -> Mapping[str, Sequence[tuple[int, int, int]]]: ...


class VllmStep(Protocol):
    """The part of vLLM's `SchedulerOutput` that tells the connector which pages the step changes or completes."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
    @property
    def preempted_req_ids(self) -> Collection[str] | None: ...
    @property
    def kv_connector_block_state(self) -> VllmBlockState: ...
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


@dataclass(frozen=True, slots=True)
class StatePage:
    """A page that has a request's recurrent state after the request's first *num_tokens* tokens.

    The page has this state from the end of a step until the next step begins to write to pages.
    """

    group_id: int
    page: int
    num_tokens: int


def state_pages(step: VllmStep) -> dict[str, list[StatePage]]:
    """Return the pages that have recurrent states once the step has ended, by request.

    Requests that do not run in the step are left out, because vLLM may have given their pages to other requests. So are
    preempted requests.
    """
    preempted = step.preempted_req_ids or ()
    return {
        request_id: [StatePage(*state) for state in states if state[1] != NULL_PAGE]
        for request_id, states in step.kv_connector_block_state.boundary_state_offloads.items()
        if request_id in step.num_scheduled_tokens and request_id not in preempted
    }
