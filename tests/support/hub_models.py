"""A local cache of the Hugging Face hub, in which names of models lead to one tiny model that needs no download."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a model that is written already needs no torch, whose import takes seconds
    from transformers import PreTrainedTokenizerFast

_REVISION = "0" * 40
_VOCABULARY = 1024
_END_MARKS = ["<|im_end|>", *(f"<|end_{number}|>" for number in range(255))]  # a fifth of all tokens: answers are short
_MAX_TOKENS = 32768


def write_hub_cache(home: Path, names: Iterable[str], model: Path) -> None:
    """Write the cache of `HF_HOME=home`, in which each name leads to the folder *model*."""
    for name in names:
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(_REVISION)
        snapshots = repository / "snapshots"
        snapshots.mkdir(exist_ok=True)
        if not (snapshots / _REVISION).exists():
            (snapshots / _REVISION).symlink_to(model, target_is_directory=True)


def write_tiny_model(folder: Path, text: str) -> None:
    """Write a model with random weights; its tokenizer is trained on *text*."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer(text)
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=_MAX_TOKENS,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(_END_MARKS),
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(text: str) -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from tool_templates import QWEN
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = ["<|im_start|>", *_END_MARKS]
    trainer = BpeTrainer(
        vocab_size=_VOCABULARY + len(special),
        special_tokens=special,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = QWEN
    return fast
