"""A model that says what a test has written for it: a standard Llama whose weights lead from each piece to the next.

The tokenizer has a token for each byte, one for each piece of a script, one to begin it with, and an end token.
Attention and MLPs are zero, so the next token hangs on the last one alone. After a byte all tokens are about as likely,
and a request chooses the script: by a `logit_bias`, or by a variable of the template, with which the prompt then ends.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from small_models import COMMON, byte_tokenizer
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

END = "<end>"
MAX_TOKENS = 1024
_PIECE = 4  # characters, or more where the piece is there already
_SURE = 1000.0  # a logit that no bias reaches
_BIAS = 100
_NOISE = 0.01


@dataclass(frozen=True)
class Scripted:
    """The model, its tokenizer, and how a request has it say a script."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    firsts: Mapping[str, int]

    def saying(self, name: str) -> dict[str, object]:
        """Parameters of a request that is answered with the script of that name."""
        return {"temperature": 0, "logit_bias": {str(self.firsts[name]): _BIAS}}

    def cue(self, name: str) -> dict[str, object]:
        """The same for an API without a `logit_bias`."""
        return {"temperature": 0, "chat_template_kwargs": {"cue": _cue(name)}}


def scripted(
    scripts: Mapping[str, str],
    template: str,
    special: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
    **settings: object,
) -> Scripted:
    """Return a model with these scripts by name.

    Args:
        scripts: Text of each script. A script may have each text in *special* once at most.
        template: The chat template, after which the script's cue is written.
        special: Texts that are special tokens, which are left out of other texts.
        tokenizer: Tokenizer to extend; the default has a token for each byte.
        settings: Further settings of the model's configuration, such as its number of layers.
    """
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = template + "{{ cue }}"
    tokenizer.add_tokens([AddedToken(text, special=True) for text in (END, *special)], special_tokens=True)
    there: set[str] = set()
    chains = {name: _pieces(script, special, there) for name, script in scripts.items()}
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in [*sorted(there), *map(_cue, scripts)]])
    ids = [tokenizer.convert_tokens_to_ids([_cue(name), *chain, END]) for name, chain in chains.items()]
    firsts = {name: first for name, (_, first, *_) in zip(scripts, ids, strict=True)}
    return Scripted(_model(len(tokenizer), ids, settings), tokenizer, firsts)


def _cue(name: str) -> str:
    return f"<cue {name}>"


def _pieces(script: str, special: Sequence[str], there: set[str]) -> list[str]:
    """The script in pieces, of which none was *there* before; now they are."""
    pieces: list[str] = []
    while script:
        length = next((len(text) for text in special if script.startswith(text)), 0)
        if not length:
            length = _PIECE
            while length < len(script) and script[:length] in there:
                length += 1
            if script[:length] in there:  # the scripts end alike: the end is a part of what comes before it
                there.remove(before := pieces.pop())
                script, length = before + script, len(before + script)
            there.add(script[:length])
        pieces.append(script[:length])
        script = script[length:]
    return pieces


@torch.no_grad()
def _model(vocab_size: int, chains: Sequence[Sequence[int]], settings: Mapping[str, object]) -> PreTrainedModel:
    assert vocab_size <= MAX_TOKENS
    sizes = {**COMMON, "vocab_size": vocab_size, "hidden_size": MAX_TOKENS, **settings}
    config = LlamaConfig(**sizes, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.zero_()
    model.model.norm.weight.fill_(1)
    model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, MAX_TOKENS))
    model.lm_head.weight.normal_(std=_NOISE, generator=torch.Generator().manual_seed(7))  # at load logits are compared
    for chain in chains:
        for before, after in pairwise(chain):  # the norm makes the one of an embedding the root of its length
            model.lm_head.weight[after, before] = _SURE / math.sqrt(MAX_TOKENS)
    model.generation_config.eos_token_id = chain[-1]
    return model
