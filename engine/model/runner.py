"""ModelRunner: a model with LoRA adapters, whose results with kvtier's attention are verified at load."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby
from types import MappingProxyType

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.check import check_miniature, check_model
from kvtier.engine.model.cpu.packed_linears import PackedLinears, available_bytes
from kvtier.engine.model.digest import config_digest, weights_digest
from kvtier.engine.model.errors import ChangedModel, oom_as_memory_error
from kvtier.engine.model.latent_attention import matrices_of
from kvtier.engine.model.lora_adapter import LoraAdapter
from kvtier.engine.model.lora_rows import LoraRows, LoraSpan
from kvtier.engine.model.paged_layout import PagedLayout
from kvtier.engine.model.paged_model import Chunk, PagedModel
from kvtier.engine.model.state_layers import StateSlab
from kvtier.engine.model.weights_watch import WeightsWatch
from kvtier.tiers.naming.namespace import Namespace
from kvtier.transfer.attached_memory import AttachedMemory, MakeMemory
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.device_slab import DeviceSlab
from kvtier.transfer.poisoned_memory import PoisonedMemory

__all__ = ["Chunk", "ModelRunner"]


class ModelRunner(PagedModel):
    """A `PagedModel` with LoRA adapters, which verifies that kvtier's attention gives the model's own results.

    It refuses to run once the model was changed. Adapters do not change the model or its `Namespace`, which identifies
    the model's KV blocks. *capacity* and *state_interval* are those of `PagedModel`. Owned and called by the engine's
    thread.

    Raises:
        UnsupportedModel: If the model needs something that a paged cache cannot provide.
        UnusableLora: If an adapter would also change the results of requests that do not use it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        block_size: int,
        capacity: int | Callable[[PagedLayout], int],
        adapters: Sequence[LoraAdapter] = (),
        state_interval: int | None = None,
    ) -> None:
        self._lora_rows: LoraRows | None = None  # set first, because `close` reads it if the next line raises
        super().__init__(model, block_size, capacity, state_interval)
        self.adapters = MappingProxyType({adapter.key: adapter for adapter in adapters})
        self._lora_rows = LoraRows(model, adapters) if adapters else None
        self._watch = WeightsWatch(model)
        self._change: str | None = None  # the change that was detected; from then on no pass runs
        self.end_token_ids = _end_token_ids(model)
        self.max_tokens: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        try:
            with oom_as_memory_error("comparing kvtier's attention with the model's own"):
                self._packed_linears = PackedLinears(model, available_bytes())
                check_model(self)
                check_miniature(self)
                if self._lora_rows is not None:
                    self._verify_rows(self._lora_rows)
        except BaseException:
            self.close()
            raise

    def namespace(self, hash_algorithm: str, hash_seed: str) -> Namespace:
        """Return the namespace of this model's KV blocks. Reads every weight of the model to compute a digest."""
        config = self.model.config
        return Namespace(
            model=str(getattr(config, "model_type", type(self.model).__name__)),
            config_digest=config_digest(config),
            weights_digest=weights_digest(self.model),
            dtype=str(self.model.dtype),
            geometry=self.geometry,
            block_size=self.block_size,
            hash_algorithm=hash_algorithm,
            hash_seed=hash_seed,
        )

    def memories(self, host_capacity_bytes: int) -> list[BlockMemory]:
        """Create the device and host memory of each group of layers. See `PagedLayout.num_slots` for their sizes.

        Raises ValueError if *host_capacity_bytes* is too small for one block.
        """
        slots = self.layout.num_slots(host_capacity_bytes, minimum=1) if host_capacity_bytes else (0,) * len(self.slabs)
        if host_capacity_bytes and not min(slots):
            raise ValueError(
                f"host capacity: {host_capacity_bytes} bytes hold no block of {sum(self.block_bytes)} bytes; "
                "raise host.capacity, or set it to 0 for no host tier"
            )
        memories: list[BlockMemory] = []
        with ExitStack() as undo:  # if one cannot be created, close the earlier ones
            for slab, num_host_slots in zip(self.slabs, slots, strict=True):
                if self.device.type == "cuda":
                    from kvtier.transfer.cuda.memory import CudaMemory

                    memories.append(CudaMemory(slab.blocks, num_host_slots, slab.num_layers))
                else:
                    memories.append(CpuMemory(slab.blocks.numpy(), num_host_slots, slab.num_layers))
                undo.callback(memories[-1].close)
            undo.pop_all()
        return memories

    def attached_memories(self) -> list[AttachedMemory]:
        """Create the memory of each group of layers for an engine with a sidecar.

        The sidecar, a process that shares its host memory with several engines, provides the host slots later.
        """
        memories: list[AttachedMemory] = []
        with ExitStack() as undo:
            for slab in self.slabs:
                memories.append(AttachedMemory(self._maker(slab)))
                undo.callback(memories[-1].close)
            undo.pop_all()
        return memories

    def poisoned(self, memories: Sequence[BlockMemory]) -> list[BlockMemory]:
        """Wrap the memories for `PoisonedCache`, so that slots hold NaN until KV is written to them."""
        return [PoisonedMemory(memory, slab.blocks) for memory, slab in zip(memories, self.slabs, strict=True)]

    @property
    def was_changed(self) -> bool:
        """True if a change of the model was detected earlier. Reading the property checks nothing."""
        return self._change is not None

    def check_unchanged(self) -> bool:
        """Check the model for changes since load, and return True if none is found.

        The check compares samples of the weights and takes about 2 ms. Once a change is found, every pass raises
        `ChangedModel`.
        """
        self._note(self._watch.sampled_change())
        return self._change is None

    def close(self) -> None:
        """Restore the model's own attention, unless another engine still uses the model. The model is not freed."""
        super().close()
        if self._lora_rows is not None:
            self._lora_rows.unhook()

    def refuse_changed(self) -> None:
        """Raise `ChangedModel` if the model's weights or modules were changed, or it is in training mode.

        The check takes 0.1 ms.
        """
        self._note(self._watch.change())
        if self._change is not None:
            raise ChangedModel(
                f"the model was changed ({self._change}) and no longer matches the blocks that kvtier cached for it; "
                "close the engine, and create a new one for the changed model"
            )
        if self._watch.is_training:
            raise ChangedModel("the model is in training mode; call its eval()")

    def _note(self, change: str | None) -> None:
        self._change = self._change or change

    def _maker(self, slab: DeviceSlab | StateSlab) -> MakeMemory:
        if self.device.type != "cuda":
            blocks = slab.blocks.numpy()
            return lambda num_host_slots, file: CpuMemory(blocks, num_host_slots, slab.num_layers, file)
        from kvtier.transfer.cuda.memory import CudaMemory, choose_methods

        choice = choose_methods(
            slab.block_bytes, self.device
        )  # measured now, because later it would slow down requests
        return lambda num_host_slots, file: CudaMemory(slab.blocks, num_host_slots, slab.num_layers, choice, file)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute all chunks in one pass, writing their keys and values into the slabs.

        Returns:
            The logits of each chunk's last `num_logits` tokens, [sum of num_logits, vocab] in float32. On CUDA the pass
            may still be running.

        Raises:
            ChangedModel: If the model was changed since it was loaded, or is in training mode.
        """
        self.refuse_changed()
        with self.claim.alone(), self._packed_linears.on():
            return super().run(chunks) if self._lora_rows is None else self._run_with_adapters(chunks, self._lora_rows)

    def _run_with_adapters(self, chunks: Sequence[Chunk], lora_rows: LoraRows) -> torch.Tensor:
        order = sorted(range(len(chunks)), key=lambda i: _lora_name(chunks[i]))  # makes an adapter's rows consecutive
        sorted_chunks = [chunks[i] for i in order]
        with lora_rows.on(self._spans(sorted_chunks)):
            logits = super().run(sorted_chunks)
        if order == list(range(len(chunks))):
            return logits
        parts = torch.split_with_sizes(logits, [chunk.num_logits for chunk in sorted_chunks])
        by_chunk = dict(zip(order, parts, strict=True))
        return torch.cat([by_chunk[i] for i in range(len(chunks))])

    def _spans(self, chunks: Sequence[Chunk]) -> list[LoraSpan]:
        """Return for each adapter which rows of the batch, and of the logits, belong to its chunks.

        Chunks of the same adapter must be consecutive.
        """
        spans = []
        first_row = first_logits = 0
        for lora, run in groupby(chunks, key=lambda chunk: chunk.lora):
            of_lora = list(run)
            end_row = first_row + sum(len(chunk.token_ids) for chunk in of_lora)
            end_logits = first_logits + sum(chunk.num_logits for chunk in of_lora)
            if lora is not None:
                rows, logits = slice(first_row, end_row), slice(first_logits, end_logits)
                spans.append(LoraSpan(rows, logits, self.adapters[lora].deltas))
            first_row, first_logits = end_row, end_logits
        return spans

    def _verify_rows(self, lora_rows: LoraRows) -> None:
        """Raise `UnusableLora` unless the layers with adapters receive one row per token, in the tokens' order."""
        lora_rows.check_outside(self._indexers.modules)
        with lora_rows.inputs() as of_expansion:
            matrices_of(self.model, self._ranks)
        lora_rows.check_unused(of_expansion)
        num_tokens = min(self.block_size, 16)
        first, second = (
            Chunk([(factor * i + 5) % self.vocab_size for i in range(num_tokens)], 0, [[slot] for _ in self.groups])
            for slot, factor in enumerate((7, 11))
        )
        with lora_rows.inputs() as of_both:
            self.run([first, second])
        with lora_rows.inputs() as of_second:
            self.run([second])
        lora_rows.check_order(of_both, of_second, num_tokens)


def _lora_name(chunk: Chunk) -> str:
    return "" if chunk.lora is None else chunk.lora.name


def _end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the end token ids in the model's generation config or, if it has none, in `model.config`."""
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config):
        end = getattr(source, "eos_token_id", None)
        if end is not None:
            return frozenset([end] if isinstance(end, int) else end)
    return frozenset()
