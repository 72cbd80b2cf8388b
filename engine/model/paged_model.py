"""PagedModel: a transformers model whose attention keeps keys and values in kvtier's KV blocks on the device."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.attention import GroupStep, Segment, Step, current_step, segment
from kvtier.engine.model.cpu.row_attention import RowAttention
from kvtier.engine.model.errors import ChangedModel
from kvtier.engine.model.image_rows import ImageRows, image_arguments, rope_positions
from kvtier.engine.model.index_keys import Indexers, IndexStep
from kvtier.engine.model.latent_attention import latent_paths, matrices_of
from kvtier.engine.model.layers import observe_layers
from kvtier.engine.model.model_claim import ModelClaim
from kvtier.engine.model.paged_gather import Scratch
from kvtier.engine.model.paged_layout import PagedLayout, paged_layout
from kvtier.engine.model.state_layers import SlotStates, SplitMixers, StatePart, StateSlab, StateStep
from kvtier.engine.model.step_cache import CACHE_ARGUMENT, CountedCache, StepCache, counts_tokens
from kvtier.tiers.naming.block_hash import Lora
from kvtier.tiers.up.promotion import NO_SLOT
from kvtier.transfer.device_slab import DeviceSlab
from kvtier.transfer.layer_gate import LayerGate

# How long a step waits for the layers of prefixes that are still being loaded. No other request computes meanwhile.
# Tokens that were computed after a wait timed out are discarded, and computed again once their prefix is loaded.
ARRIVAL_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request that a step computes.

    The request must hold leases on the blocks of *tables*, so that they are not evicted during the step. In the group
    of states, the state after the chunk is written to the slot of its last token's block. The chunk goes on from the
    state in the slot of the block of token *start* - 1, which is copied first if it is another slot. If that block has
    NO_SLOT, the state is in the target slot already.
    """

    token_ids: Sequence[int]
    start: int  # position of the first token
    tables: Sequence[Sequence[int]]  # [group][block] -> device slot
    gate: LayerGate | None = None  # if the prefix is still being loaded
    lora: Lora | None = None  # one of the runner's adapters
    num_logits: int = 1  # number of last tokens to return the logits of
    images: ImageRows | None = None  # if the request's prompt has images


class PagedModel:
    """A transformers model that computes batches of requests, with their KV blocks in device slabs.

    Layers of equal attention and KV shape form a group, and all recurrent and convolution states form another. Each
    group has a slab, a tensor of slots for blocks or for states. This class does not check that paged attention gives
    the same results as the model's own attention; `ModelRunner` does. *state_interval* is the
    `PagedLayout.configured_interval`, and *capacity* the bytes of all slabs, which may depend on the layout.
    Only one thread may call this class's methods.

    Raises:
        UnsupportedModel: If the model needs something that a paged cache cannot provide.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        block_size: int,
        capacity: int | Callable[[PagedLayout], int],
        state_interval: int | None = None,
    ) -> None:
        self.model = model.eval()  # type: ignore[no-untyped-call]  # untyped in transformers
        self.block_size = block_size
        self.device = torch.device(model.device)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]  # a tensor
        self.claim = ModelClaim(model)
        try:
            with self.claim.alone():
                self.observed = observe_layers(model, block_size)
                layers = self.observed.attention
                self._ranks = {layer_id: layer.ranks for layer_id, layer in layers.items() if layer.rank}
                self._matrices = matrices_of(model, self._ranks)
                self._mixers = SplitMixers(self.observed.states)
                self._indexers = Indexers(model, [layer_id for layer_id, layer in layers.items() if layer.index])
                self.claim.begin()
            self.layout = paged_layout(self.observed, block_size, model.dtype, state_interval)
        except BaseException:
            self.claim.release()
            raise
        self.layers = tuple(layers.values())  # those with attention
        self.groups = self.layout.groups
        self.geometry = self.layout.geometry
        self.block_bytes = self.layout.block_bytes
        self._cache = CountedCache if counts_tokens(model) and not len(self._mixers) else StepCache
        self._scratch = Scratch()
        self._row_attention = RowAttention(torch.get_num_threads())
        try:
            capacity_bytes = capacity(self.layout) if callable(capacity) else capacity
            self.num_slots = self.layout.device_slots(capacity_bytes)[0]  # of each attention group
            self.slabs = self.layout.slabs(capacity_bytes, self.device)  # by group
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the model's own attention, unless another engine still uses the model. The model is not freed."""
        self.claim.release()
        self._row_attention.close()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute all chunks in one pass, writing their keys and values into the slabs.

        Returns:
            The logits of each chunk's last `num_logits` tokens, [sum of num_logits, vocab] in float32. On CUDA the pass
            may still be running.

        Raises:
            ChangedModel: If some layer did not call kvtier's attention, or did not use its state.
        """
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        positions = torch.tensor(
            [chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))], device=self.device
        )
        ends, end = [], 0
        for chunk in chunks:
            end += len(chunk.token_ids)
            ends.append(end)
        input_ids = torch.tensor(token_ids, device=self.device)
        lengths, images = [len(chunk.token_ids) for chunk in chunks], [chunk.images for chunk in chunks]
        has_images = any(each is not None for each in images)
        wanted = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_logits, end)]
        with (
            self.claim.alone(),
            self._step(chunks, ends) as step,
            self._indexers.on(step.index),
            self._states_of(chunks, ends) as states,
        ):
            self.claim.check()
            logits: torch.Tensor = self.model(
                input_ids=input_ids[None],
                position_ids=rope_positions(positions, lengths, images),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, device=self.device),
                **(image_arguments(self.model, input_ids, lengths, images) if has_images else {}),
                **{CACHE_ARGUMENT: self._cache(positions, step.receive, step.receive_index)},
                **({"attention_mask": torch.ones_like(input_ids)[None]} if self._cache is CountedCache else {}),
                **({} if step.index is None else {"attention_mask": step.index.mask}),
            ).logits
            num_layers = len(self.layers) + len(self._mixers)
            if (num_seen := len(step.layers_seen) + len(states.mixers_seen)) != num_layers:
                raise ChangedModel(
                    f"only {num_seen} of {num_layers} layers went through kvtier's attention or states, "
                    "because the model's attention or layers were changed; close the engine before you change the model"
                )
        rows = logits[0].float()
        return rows if len(rows) == len(wanted) else rows[wanted]  # some models return the logits of all tokens

    @contextmanager
    def _step(self, chunks: Sequence[Chunk], ends: Sequence[int]) -> Iterator[Step]:
        group_ids = range(self.layout.num_attention_groups)
        groups = tuple(self._group_step(group_id, chunks, ends) for group_id in group_ids)
        gates = tuple(chunk.gate for chunk in chunks if chunk.gate is not None)
        indexed = next((group for group in groups if group.index_width), None)
        index = None if indexed is None else IndexStep(indexed.segments)
        give_up_at = time.monotonic() + ARRIVAL_WAIT_S
        step = Step(groups, self.layout.places, self.layout.readers, gates, give_up_at, index)
        token = current_step.set(step)
        try:
            yield step
        finally:
            current_step.reset(token)

    @contextmanager
    def _states_of(self, chunks: Sequence[Chunk], ends: Sequence[int]) -> Iterator[StateStep]:
        """While in the context, let the mixers use the states of the requests that *chunks* belong to."""
        step = StateStep([], ends[-1])
        slab = self.slabs[-1]
        if isinstance(slab, StateSlab):
            slots = []
            for chunk in chunks:
                before, now = (
                    chunk.tables[-1][max(0, position) // self.block_size]
                    for position in (chunk.start - 1, chunk.start + len(chunk.token_ids) - 1)
                )
                if chunk.start and before not in (now, NO_SLOT):
                    slab.copy(before, now)
                assert now != NO_SLOT, "a chunk without a slot for its state"
                slots.append(now)
            step = StateStep(_state_parts(slab, chunks, ends, slots), ends[-1])
        with self._mixers.on(step):
            yield step

    def _group_step(self, group_id: int, chunks: Sequence[Chunk], ends: Sequence[int]) -> GroupStep:
        slots: list[int] = []
        offsets: list[int] = []
        segments: list[Segment] = []
        for chunk, end in zip(chunks, ends, strict=True):
            table, num_tokens = chunk.tables[group_id], len(chunk.token_ids)
            positions = range(chunk.start, chunk.start + num_tokens)
            slots += [table[position // self.block_size] for position in positions]
            offsets += [position % self.block_size for position in positions]
            rows = slice(end - num_tokens, end)
            segments.append(segment(self.groups[group_id], table, rows, chunk.start, num_tokens, self.device))
        slab = self.slabs[group_id]
        assert isinstance(slab, DeviceSlab), "an attention group keeps blocks"
        return GroupStep(
            slab,
            torch.tensor(slots, device=self.device),
            torch.tensor(offsets, device=self.device),
            tuple(segments),
            self._row_attention,
            latent_paths(segments, self._matrices is not None) if self.layout.is_latent(group_id) else None,
            self._matrices or {},
            self._scratch,
            index_width=self.layout.index_widths[group_id],
        )


def _state_parts(
    slab: StateSlab, chunks: Sequence[Chunk], ends: Sequence[int], slots: Sequence[int]
) -> list[StatePart]:
    """Divide a batch into the parts that a mixer computes in one call. *slots* has the slot of each chunk's state.

    The last tokens of requests that compute one token each are one part.
    """
    parts = []
    single_rows, single_slots = [], []
    for chunk, end, slot in zip(chunks, ends, slots, strict=True):
        num_tokens = len(chunk.token_ids)
        if num_tokens == 1 and chunk.start:
            single_rows.append(end - 1)
            single_slots.append(slot)
        else:
            rows = slice(end - num_tokens, end)
            parts.append(StatePart(rows, SlotStates(slab, [slot], chunk.start > 0), 1))
    if len(single_rows) == 1:
        rows = slice(single_rows[0], single_rows[0] + 1)
        parts.append(StatePart(rows, SlotStates(slab, single_slots, True), 1))
    elif single_rows:
        picked = torch.tensor(single_rows, device=slab.blocks.device)
        parts.append(StatePart(picked, SlotStates(slab, single_slots, True), len(single_slots)))
    return parts
