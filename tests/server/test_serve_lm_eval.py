"""lm-eval's `local-completions` against `kvtier serve` gives what its `hf` gives for the same model."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import serving
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRIPT = Path(serving.__file__).with_name("lm_eval_both.py")
PYTHON = Path(sys.prefix) / "lm-eval" / "bin" / "python"
TOLERANCE = 1e-3
NUM_QUESTIONS, NUM_PAGES = 10, 3
WORDS = "harbour keeper counts every rope lantern barrel and sail before winter storms come home"

QUESTIONS = """
task: ten_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""
PAGES = """
task: pages
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
"""


def sentence(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=num_words)).capitalize()


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs of the texts, and an end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")


def small_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(7)
    end = tokenizer.eos_token_id
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.2,
            bos_token_id=end,
            eos_token_id=end,
        )
    ).eval()


def write_tasks(folder: Path, rng: random.Random) -> list[str]:
    """Ten questions and three pages, as lm-eval reads them; their texts."""
    questions = [
        {"question": f"{sentence(rng, 8)}?", "choices": rng.sample(WORDS.split(), 4), "answer": rng.randrange(4)}
        for _ in range(NUM_QUESTIONS)
    ]
    pages = [{"page": f"{sentence(rng, 150)}."} for _ in range(NUM_PAGES)]
    for name, template, rows in (("questions", QUESTIONS, questions), ("pages", PAGES, pages)):
        data = folder / f"{name}.json"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(template.format(data=data))
    return [row["question"] for row in questions] + [row["page"] for row in pages]


@pytest.mark.long
def test_lm_eval_scores_a_served_model_as_it_scores_the_model_itself(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("lm-eval is not installed; make .venv/lm-eval/installed")
    tasks, folder = tmp_path / "tasks", tmp_path / "model"
    tasks.mkdir()
    tokenizer = trained_tokenizer(write_tasks(tasks, random.Random(5)))
    model = small_llama(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = {"device": {"capacity": "8MiB", "block_size": 16}, "host": {"capacity": "8MiB"}}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}

    with serving.serving(model, config, tokenizer=tokenizer) as server:
        command = [PYTHON, SCRIPT, folder, tasks, server.url]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300
        )
        told = server.get("/v1/kvtier/stats").json()["tokens"]
    assert done.returncode == 0, done.stderr[-3000:]

    both = json.loads(done.stdout.splitlines()[-1])
    own, served = both["hf"], both["served"]
    assert {task: len(found) for task, found in served["samples"].items()} == {"ten_questions": 10, "pages": 3}
    assert served["metrics"]["ten_questions"]["acc,none"] == pytest.approx(own["metrics"]["ten_questions"]["acc,none"])
    for task, metrics in own["metrics"].items():
        assert served["metrics"][task] == pytest.approx(metrics, rel=TOLERANCE), task
    for task, samples in own["samples"].items():
        for mine, theirs in zip(served["samples"][task], samples, strict=True):
            assert flat(mine) == pytest.approx(flat(theirs), abs=TOLERANCE), task
    assert told["reasons"]["scored"] > 0  # questions share their text with their other choices


def flat(responses: object) -> list[float]:
    """The numbers in what lm-eval has of a document: logarithms, and whether each is greedy."""
    if isinstance(responses, list):
        return [number for each in responses for number in flat(each)]
    return [float(responses)]
