"""The demo's tokenizer and model, a two-layer Llama without training: its weights are computed by this module.

The prompt ends with "the code of NAME is". The model outputs the WORD that the text gave for NAME, and then ends. The
model reads WORD from a single position of the KV cache, however far back. If the block of this position is lost, there
is no answer. If the block is stale or belongs to another document, the answer is wrong.

Layer 1 has two heads, which copy the two preceding tokens into each position. Layer 2 works at the last position, "is",
whose preceding token is NAME. It looks for an earlier position with NAME two tokens before it. In "NAME is WORD", this
is the position of WORD. Layer 2 copies WORD from there. This is an induction head (Olsson et al. 2022) that skips one
token.
"""

import math
import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

from kvtier.cli.demo.document import NAMES, TOKEN_PATTERN, vocabulary

UNK, BOS, EOS = SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")

MAX_POSITIONS = 65536
HEAD_DIM = 128
ROPE_THETA = 1e9

# Parts of the residual stream: three are written by the embedding, two by layer 1, the last by layer 2.
# Each part is a vector of length 1, so the RMS is known in every layer and the norms can be undone.
HIDDEN_SIZE = 512
VALUE = slice(0, 128)  # the token itself, to copy
CONTENT = slice(128, 178)  # the name, to match; the last dimension means "no name"
CONSTANT = 178
ONE_BACK = slice(180, 230)  # CONTENT of the previous token
TWO_BACK = slice(230, 280)
ANSWER = slice(280, 408)  # VALUE of the token found
VALUE_DIM, CONTENT_DIM = 128, 50

# RoPE rotates dimensions (i, i + HEAD_DIM / 2) together, the first pairs fastest. Fast pairs distinguish
# neighbours. Slow pairs rotate by less than 0.25 rad in MAX_POSITIONS and match content at any position.
PAIRS = HEAD_DIM // 2
FAST = torch.arange(16)
SLOW = torch.cat([torch.arange(PAIRS - CONTENT_DIM // 2, PAIRS), torch.arange(HEAD_DIM - CONTENT_DIM // 2, HEAD_DIM)])

SCORE_SCALE = math.sqrt(HEAD_DIM)  # attention divides by this

# Attention scores. A neighbour beats the next best position by NEIGHBOUR_SCORE * 0.99 or more.
NEIGHBOUR_SCORE = 20.0
# Matching content scores 100, another name 60 or less, and each "no name" 80. Even 65,536 "no names" lose to a
# match (80 + ln 65,536 = 91). If no name matches, they win over other names, and the answer is a mean of all tokens.
MATCH_SCORE, NO_NAME_SCORE = 100.0, 80.0

# Logits. A word that is found has 50, a similar word at most 25, and any word in a mean of all tokens less than 10.
# The end of the text always has 30 (33 if nothing is found, because the stream then has one part less).
FOUND_LOGIT, END_LOGIT = 50.0, 30.0


def build_demo_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the model, on the CPU and always with the same float32 weights, and its word-level tokenizer."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HEAD_DIM,  # the MLPs are zero
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]  # untyped in transformers
    _write_weights(model, tokenizer)
    return model, tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word, digit and punctuation mark.

    A space before a word or digit is part of the token, so that decoding only has to join tokens.
    """
    forms = [form for word in vocabulary() for form in (word, word.lower(), word.capitalize())]
    spaced = [space + form for form in (*forms, *string.digits) for space in (" ", "")]
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *spaced, *string.punctuation, " ", "\n", "\t"])

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=tokenizer,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def _write_weights(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    for parameter in model.parameters():
        parameter.zero_()
    generator = torch.Generator().manual_seed(0)
    value = _sign_vectors(len(tokenizer), VALUE_DIM, generator)  # [vocab, VALUE_DIM]

    embedding = model.model.embed_tokens.weight  # [vocab, hidden]
    embedding[:, VALUE] = value
    embedding[:, CONTENT] = _contents(tokenizer, generator)
    embedding[:, CONSTANT] = 1.0

    first, second = model.model.layers
    _undo_norm(first.input_layernorm.weight, num_parts=3)
    _write_neighbour_heads(first.self_attn)
    _undo_norm(second.input_layernorm.weight, num_parts=5)
    _write_lookup_head(second.self_attn)

    _undo_norm(model.model.norm.weight, num_parts=6)
    head = model.lm_head.weight  # [vocab, hidden]
    head[:, ANSWER] = FOUND_LOGIT * value
    head[tokenizer.eos_token_id] = 0.0
    head[tokenizer.eos_token_id, CONSTANT] = END_LOGIT


def _write_neighbour_heads(attention: LlamaAttention) -> None:
    # Layer 1 has two heads, which copy CONTENT of the two preceding tokens into each position.
    # All keys are the same vector. A head's query is this vector, which RoPE rotates by the position less the head's
    # offset. So the score is sum(cos((distance - offset) * frequency)), which is highest if the distance is the offset.
    q, k, v, o = _projections(attention)
    frequency = ROPE_THETA ** (-FAST.double() / PAIRS)  # float64, so that all machines round to the same weights
    for head, (offset, room) in enumerate([(1, ONE_BACK), (2, TWO_BACK)]):
        q[head, FAST, CONSTANT] = (NEIGHBOUR_SCORE * SCORE_SCALE * torch.cos(offset * frequency)).float()
        q[head, FAST + PAIRS, CONSTANT] = (-NEIGHBOUR_SCORE * SCORE_SCALE * torch.sin(offset * frequency)).float()
        o[room, head, :CONTENT_DIM] = torch.eye(CONTENT_DIM)
    k[0, FAST, CONSTANT] = 1.0
    v[0, :CONTENT_DIM, CONTENT] = torch.eye(CONTENT_DIM)


def _write_lookup_head(attention: LlamaAttention) -> None:
    """Write the weights of layer 2: one head, which finds the answer in an earlier "NAME is WORD" and copies WORD."""
    # The query is the name one token before the last "is". It matches the key of WORD, the name two tokens before WORD.
    q, k, v, o = _projections(attention)
    q[0, SLOW, ONE_BACK] = MATCH_SCORE * SCORE_SCALE * torch.eye(CONTENT_DIM)
    q[0, SLOW[-1], CONSTANT] = NO_NAME_SCORE * SCORE_SCALE
    k[0, SLOW, TWO_BACK] = torch.eye(CONTENT_DIM)
    v[0, :, VALUE] = torch.eye(VALUE_DIM)
    o[ANSWER, 0, :] = torch.eye(VALUE_DIM)


def _projections(attention: LlamaAttention) -> list[torch.Tensor]:
    """Return views of the weight tensors: q, k, v [heads, head_dim, hidden] and o [hidden, heads, head_dim]."""
    inputs = attention.q_proj, attention.k_proj, attention.v_proj
    return [
        *(linear.weight.view(-1, HEAD_DIM, HIDDEN_SIZE) for linear in inputs),
        attention.o_proj.weight.view(HIDDEN_SIZE, -1, HEAD_DIM),
    ]


def _undo_norm(weight: torch.Tensor, num_parts: int) -> None:
    """Set an RMSNorm's *weight* so that a sum of *num_parts* orthogonal vectors of length 1 passes unchanged."""
    weight.fill_(math.sqrt(num_parts / HIDDEN_SIZE))


def _contents(tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> torch.Tensor:
    # Each name has its own vector of random signs. All other tokens share one vector, which is 1 in the last dimension.
    contents = torch.zeros(len(tokenizer), CONTENT_DIM)  # [vocab, CONTENT_DIM]
    contents[:, -1] = 1.0
    signs = _sign_vectors(len(NAMES), CONTENT_DIM - 1, generator)
    for spaced in (NAMES, [f" {name}" for name in NAMES]):
        contents[tokenizer.convert_tokens_to_ids(spaced)] = torch.nn.functional.pad(signs, (0, 1))
    return contents


def _sign_vectors(num_vectors: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Return random vectors, [num_vectors, dim]. All have length 1, and their entries differ only in sign."""
    signs = torch.randint(2, (num_vectors, dim), generator=generator) * 2 - 1
    return signs / math.sqrt(dim)
