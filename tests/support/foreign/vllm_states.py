"""What vLLM's own managers say of recurrent states, as lines of JSON: vllm_states.py

Runs in the environment that install.py makes. It makes a `KVCacheManager` for a group of states (mode "align") and one
of full attention, and allocates for requests as vLLM's scheduler does. No model is computed.
"""

import json

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

BLOCK = 16
NUM_BLOCKS = 64


def manager(retention: int | None) -> KVCacheManager:
    """A manager of both groups; *retention* is vLLM's interval between the states that it keeps."""
    state = MambaSpec(
        block_size=BLOCK, shapes=((3, 8), (2, 4)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align"
    )
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["state"], state), KVCacheGroupSpec(["attention"], attention)]
    config = KVCacheConfig(NUM_BLOCKS, [], groups, prefix_cache_retention_interval=retention)
    return KVCacheManager(
        config, max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )


def request(name: str, num_tokens: int) -> Request:
    """A request whose prompt no other one begins with."""
    tokens = [sum(name.encode()), *range(1, num_tokens)]
    return Request(
        name, tokens, SamplingParams(max_tokens=1), None, block_hasher=get_request_block_hasher(BLOCK, sha256)
    )


def tables(core: KVCacheManager, name: str) -> list[list[int]]:
    """The pages of the request, by group."""
    return [list(ids) for ids in core.get_block_ids(name)]


def say(what: str, **facts: object) -> None:
    print(json.dumps({"what": what, **facts}))


def computed(what: str, retention: int | None, chunks: list[int]) -> None:
    """A prompt that is computed in these chunks."""
    core, prompt = manager(retention), request("a", sum(chunks))
    for chunk in chunks:
        core.new_step_starts()
        core.allocate_slots(prompt, chunk)
        offers = core.take_boundary_state_offloads()
        prompt.num_computed_tokens += chunk
        say(what, computed=prompt.num_computed_tokens, offers=offers.get("a", []), pages=tables(core, "a"))


def preempted() -> None:
    """A request that is preempted in the step that offers its state."""
    core, prompt = manager(None), request("a", 40)
    core.new_step_starts()
    core.allocate_slots(prompt, 32)
    core.free(prompt)
    say("preempted", offers=core.take_boundary_state_offloads())


def loaded() -> None:
    """A request whose first 48 of 50 tokens are loaded while it waits."""
    core, prompt = manager(0), request("a", 50)
    core.new_step_starts()
    core.allocate_slots(prompt, 0, num_external_computed_tokens=48, delay_cache_blocks=True)
    say("allocated", pages=tables(core, "a"), offers=core.take_boundary_state_offloads())
    prompt.num_computed_tokens = 48
    core.cache_blocks(prompt, 48)
    core.new_step_starts()
    core.allocate_slots(prompt, 2)
    say("loaded", pages=tables(core, "a"), offers=core.take_boundary_state_offloads().get("a", []))


if __name__ == "__main__":
    init_none_hash(sha256)
    computed("every state", None, [32, 16, 2])
    computed("last state", 0, [32, 16, 2])
    preempted()
    loaded()
