"""LLM, the synchronous API: completions of prompts, with a prefix cache that survives the process."""

from __future__ import annotations  # so that help() shows the names of types, not what they stand for

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from kvtier.engine.build_core import build_core
from kvtier.engine.config import Config, ModelConfig, as_config, size_text
from kvtier.engine.core import EngineCore, EngineStatistics, with_images
from kvtier.engine.images.chat_prompt import chat_prompt
from kvtier.engine.images.engine_images import Images
from kvtier.engine.images.image_prompt import ImagePrompt, PreparedPrompt
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.engine.model.errors import oom_as_memory_error
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.observability.metrics.server import serve_metrics
from kvtier.engine.one_caller import OneCaller
from kvtier.engine.scheduling.request import Completion, Request, RequestOptions
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, ExtraKeys
from kvtier.tiers.naming.request_text import check_text

Prompt = str | Sequence[int] | npt.NDArray[np.integer] | ImagePrompt
GREEDY = SamplingParams()
MIN_PROMPTS_FOR_PROGRESS = 4  # from this number of prompts on, `generate` shows a progress bar on a terminal


class LLM:
    """A model that completes prompts, with its KV cache in several tiers: device, host memory, disk and others.

    Use it as a context manager or call `close`. Closing, also at exit, flushes cached blocks to the disk tier, so that
    the next start is warm. Calls from several threads run one after the other; `AsyncLLM` batches them. Every call
    raises RuntimeError after `close`, and in a process that was forked after the LLM was created.

    Args:
        model: A folder, a GGUF file, a hub id, "smollm2", or a loaded `transformers` model.
        config: A `Config`, a dict, a TOML file, or the name of a shipped configuration such as "laptop".
        tokenizer: Required with a loaded model.
        image_processor: Required with a loaded model whose prompts have images: a processor of transformers that uses
            pillow, from `AutoImageProcessor.from_pretrained(..., backend="pil")`.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: Config | Mapping[str, object] | str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_processor: BaseImageProcessor | None = None,
    ) -> None:
        self.config = as_config({} if config is None else config)
        self._calls = OneCaller("LLM")
        self._description = described("LLM", model, self.config)
        self._is_callers_model = isinstance(model, PreTrainedModel)
        loaded, tokenizer = load_model(model, self.config.model, tokenizer)
        image_processor = image_processor or load_image_processor(model)
        self.core = build_core(loaded, tokenizer, self.config, image_processor=image_processor)
        self._closer = weakref.finalize(self, self.core.close)
        try:
            self._metrics = serve_metrics(lambda: self.core.statistics, self.config, model_name(model, self.config))
        except BaseException:
            self._closer()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
        extra: ExtraKeys | None = None,
        skip_reading_prefix_cache: bool = False,
        max_load_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Generate continuations of all prompts in one batch, and return them in order.

        Prompts share cached blocks only with prompts of the same *lora*, *cache_salt* and *extra*.

        Args:
            prompts: One prompt or several; a prompt is a text, a sequence of token ids, or an `ImagePrompt`.
            sampling: Sampling parameters; by default those of `default_sampling`.
            lora: Name of a LoRA adapter of the configuration.
            cache_salt: Name of the tenant whose blocks the prompts may use, and whose quota they count in.
            extra: Further keys that separate the blocks of these prompts from those of others.
            skip_reading_prefix_cache: Compute all tokens, even if they are cached.
            max_load_tokens: Limit on the tokens that each prompt loads from slower tiers than the device.
            progress: Whether to show a progress bar. By default a terminal shows one for at least four prompts.

        Raises:
            ValueError: If a prompt cannot fit the device pool, an image cannot be used, or the adapter is not loaded.
            ChangedModel: If the model was changed since it was loaded.
        """
        arrived_at = time.monotonic()
        options = RequestOptions(reads_cache=not skip_reading_prefix_cache, max_load_tokens=max_load_tokens)
        with self._calls:
            if self._is_callers_model:
                self.core.check_model_unchanged()
            keys = keyed(self.core, extra, lora, cache_salt)
            return self._generate(as_prompts(prompts), sampling, keys, arrived_at, options, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> Completion:
        """Generate the assistant's answer to a conversation, which is written with the model's chat template.

        Args:
            messages: Messages with a `role` and a `content`: a text, or a list of parts `{"type": "text", "text": ...}`
                and `{"type": "image", "image": ...}`, whose image is a PIL image.
            sampling: As in `generate`.
            lora: As in `generate`.
            cache_salt: As in `generate`.

        Raises:
            ValueError: As in `generate`, or if the tokenizer has no chat template or rejects the messages.
        """
        prompt = chat_prompt(self.core.tokenizer, messages)
        (done,) = self.generate(prompt, sampling, lora=lora, cache_salt=cache_salt)
        return done

    def _generate(
        self,
        todo: Sequence[Prompt],
        sampling: SamplingParams | None,
        keys: ExtraKeys,
        arrived_at: float,
        options: RequestOptions,
        progress: bool | None,
    ) -> list[Completion]:
        sampling = self.core.sampling_defaults.over(GREEDY) if sampling is None else sampling
        requests: list[Request] = []
        wanted = len(todo) >= MIN_PROMPTS_FOR_PROGRESS and sys.stderr.isatty() if progress is None else progress
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.core.catch_up()
        try:
            with Progress(*columns, console=Console(stderr=True), transient=True, disable=not wanted) as bar:
                task = bar.add_task("prompts", total=len(todo))
                while len(requests) < len(todo) or self.core.has_work:
                    while len(requests) < len(todo) and self._has_room:
                        requests.append(self._add(todo[len(requests)], sampling, keys, arrived_at, options))
                    bar.advance(task, sum(request.finish_reason is not None for request in self.core.step()))
        finally:
            for request in requests:
                self.core.abort(request)
        self.core.share()
        return [request.completion() for request in requests]

    def _add(
        self, prompt: Prompt, sampling: SamplingParams, keys: ExtraKeys, arrived_at: float, options: RequestOptions
    ) -> Request:
        # A method of its own: only the request holds its prepared images, and frees them when it ends.
        ready = prepare(self.core.tokenizer, self.core.images, prompt, keys.cache_salt)
        return self.core.add(ready.token_ids, sampling, keys, arrived_at, options, images=ready.images)

    @property
    def _has_room(self) -> bool:
        """True if another prompt may be queued: the queue is not full, and images do not take too much memory."""
        is_free = self.core.images.has_room or not self.core.has_work
        return is_free and self.core.num_waiting < self.config.scheduler.max_waiting

    def default_sampling(self) -> SamplingParams:
        """Return the sampling parameters of the model's `generation_config`.

        Parameters that the model does not set get kvtier's defaults: greedy sampling of 16 tokens. With
        `model.generation_config = "none"` in the configuration, all parameters get these defaults.
        """
        return self.core.sampling_defaults.over(GREEDY)

    def where(
        self,
        prompt: Prompt,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
        extra: ExtraKeys | None = None,
    ) -> dict[str, int]:
        """Return the number of the prompt's tokens in each tier; "nowhere" counts tokens that are not cached."""
        with self._calls:
            keys = keyed(self.core, extra, lora, cache_salt)
            prepared = prepare(self.core.tokenizer, self.core.images, prompt, keys.cache_salt)
            if prepared.images is not None:
                keys = with_images(keys, prepared.images)
            return self.core.where(prepared.token_ids, keys)

    def reset_prefix_cache(self) -> bool:
        """Evict all blocks from device, host memory and disk.

        A remote tier keeps its blocks, so later prompts may still hit them.

        Returns:
            True if the blocks were evicted. False, with nothing evicted, if copies between tiers do not finish in time
            or the disk store fails.
        """
        with self._calls:
            return self.core.reset()

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of all counters and states, which later calls do not change."""
        with self._calls:
            self.core.idle()
            return self.core.statistics

    def check(self) -> None:
        """Check the invariants of cache and scheduler, and raise AssertionError if one is violated."""
        with self._calls:
            self.core.check()

    def close(self, progress: Callable[[int], None] = lambda num_left: None) -> None:
        """Flush cached blocks to disk and end all threads. *progress* receives the number of blocks left to write."""
        self._calls.close(partial(self._close, progress))

    def _close(self, progress: Callable[[int], None]) -> None:
        self._metrics.close()
        if self._closer.detach() is not None:
            self.core.close(progress)

    def __repr__(self) -> str:
        return self._description

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM has threads and device memory and cannot be pickled or copied; create one in each process"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_model(
    model: str | Path | PreTrainedModel, config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model on its device, and its tokenizer.

    Raises:
        ValueError: If *model* is a loaded model without a tokenizer, or is not a `transformers` model.
    """
    if not isinstance(model, str | Path | PreTrainedModel):
        kind = type(model).__name__
        raise ValueError(
            f"model: {kind} is not a transformers model; "
            "pass a path or a PreTrainedModel, and list LoRA adapters in [lora]"
        )
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise ValueError("tokenizer: a loaded model needs one; pass tokenizer=, or pass the model as a path")
        return model, tokenizer
    device = torch_device(config.device)
    checkpoint = Checkpoint.of(model)
    loaded = checkpoint.model(config.dtype)
    tokenizer = tokenizer or checkpoint.tokenizer()
    with oom_as_memory_error(f"moving the model {model} to {device}"):
        torch.nn.Module.to(loaded, device)
    return loaded, tokenizer


def load_image_processor(model: str | Path | PreTrainedModel) -> BaseImageProcessor | None:
    """Return the image processor of a model that is given by name; None if it has none or pillow is not installed."""
    if isinstance(model, PreTrainedModel) or find_spec("PIL") is None:
        return None
    return Checkpoint.of(model).image_processor()


def model_name(model: str | Path | PreTrainedModel, config: Config) -> str:
    """Return the model's name: `server.model_name`, or by default its folder, file, hub id or class."""
    if config.server.model_name is not None:
        return config.server.model_name
    if isinstance(model, PreTrainedModel):
        return str(model.config.name_or_path or type(model).__name__)
    return Checkpoint.of(model).served_name


def described(kind: str, model: str | Path | PreTrainedModel, config: Config) -> str:
    """Return the `repr` of an object of class *kind*: its model, and its tiers with their sizes."""
    name = model.config.name_or_path or type(model).__name__ if isinstance(model, PreTrainedModel) else str(model)
    device = config.device
    share = device.gpu_memory_utilization
    tiers = [f"device={size_text(device.capacity) if share is None else f'{share:.0%} of GPU memory'}"]
    if config.sidecar is not None:
        tiers.append(f"sidecar={config.sidecar}")
    if config.host is not None:
        tiers.append(f"host={size_text(config.host.capacity)}")
    if config.disk is not None:
        tiers.append(f"disk={size_text(config.disk.capacity)} at {config.disk.path}")
    if config.remote is not None:
        tiers.append("remote=yes")  # its URL may hold a password
    return f"<{kind} {name}: {', '.join(tiers)}>"


def torch_device(name: str) -> torch.device:
    """Return the device called *name*; "auto" is a GPU if there is one. Raise ValueError for "cuda" without a GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no GPU; use cpu, or auto")
    return torch.device(name)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return *prompts* as a list. One prompt, a text or a sequence of token ids, becomes a list of one."""
    if isinstance(prompts, str | ImagePrompt) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]  # a sequence that starts with a number is one prompt's tokens
    return list(prompts)  # any other sequence holds prompts


def prepare(
    tokenizer: PreTrainedTokenizerBase, images: Images, prompt: Prompt, cache_salt: str | None
) -> PreparedPrompt:
    """Return the tokens and images of *prompt*, with the image part *images* of the engine that is to compute it.

    Raises:
        ValueError: If the text is not valid Unicode, or an image cannot be used.
    """
    if isinstance(prompt, ImagePrompt):
        return images.prepare(encode(tokenizer, prompt.prompt), prompt.images, cache_salt)
    return PreparedPrompt(encode(tokenizer, prompt))


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int] | npt.NDArray[np.integer]) -> Sequence[int]:
    """Return the prompt's token ids. Raise ValueError if the text is not valid Unicode."""
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        token_ids: list[int] = tokenizer(prompt)["input_ids"]
        return token_ids
    return prompt.tolist() if isinstance(prompt, np.ndarray) else prompt


def keyed(core: EngineCore, extra: ExtraKeys | None, lora: str | None, cache_salt: str | None) -> ExtraKeys:
    """Return *extra* with the cache salt and the key of the adapter called *lora*. If one is None, do not add it.

    Raises:
        ValueError: If the adapter is not loaded.
    """
    extra = NO_EXTRA_KEYS if extra is None else extra
    if cache_salt is not None:
        extra = replace(extra, cache_salt=cache_salt)
    return extra if lora is None else replace(extra, lora=core.lora_key(lora))
