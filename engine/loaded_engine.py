"""LoadedEngine: an engine's core together with its tokenizer threads and its metrics server."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from kvtier.engine.build_core import build_core
from kvtier.engine.config import Config, size_text
from kvtier.engine.core import EngineCore
from kvtier.engine.llm import load_image_processor, load_model, model_name
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.engine.observability.metrics.server import MetricsServer, serve_metrics
from kvtier.engine.text.tokenizer_threads import TokenizerThreads


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready to serve. The engine's thread creates it, closes it and owns the *core*."""

    core: EngineCore
    tokenizers: TokenizerThreads
    metrics: MetricsServer

    @classmethod
    def load(
        cls,
        model: str | Path | PreTrainedModel,
        config: Config,
        tokenizer: PreTrainedTokenizerBase | None,
        progress: Callable[[str], None],
        image_processor: BaseImageProcessor | None = None,
    ) -> Self:
        """Load a model and build its engine. Arguments and errors are those of `LLM`.

        *progress* is called with the name of each stage.
        """
        progress(_loading(model))
        loaded, its_tokenizer = load_model(model, config.model, tokenizer)
        with ExitStack() as undo:
            tokenizers = TokenizerThreads(its_tokenizer, config.server.tokenizer_threads)
            undo.callback(tokenizers.close)
            core = build_core(loaded, its_tokenizer, config, progress, image_processor or load_image_processor(model))
            undo.callback(core.close)
            progress("reading the vocabulary")
            core.grammars.prepare()
            metrics = serve_metrics(lambda: core.statistics, config, model_name(model, config))
            undo.pop_all()
        return cls(core, tokenizers, metrics)

    def close(self, progress: Callable[[int], None]) -> None:
        """Flush cached blocks to disk and end all threads. *progress* receives the number of blocks left to write."""
        with ExitStack() as ends:  # close every part, even if another one raises
            ends.callback(self.core.close, progress)
            ends.callback(self.metrics.close)
            ends.callback(self.tokenizers.close)


def _loading(model: str | Path | PreTrainedModel) -> str:
    if isinstance(model, PreTrainedModel):
        return "using the loaded model"
    num_bytes = Checkpoint.of(model).weights_bytes
    return "downloading the weights" if num_bytes is None else f"loading the weights, {size_text(num_bytes)}"
