"""Run by lm-eval's own Python: the same tasks with its `hf` and with its `local-completions`; prints both as JSON.

python lm_eval_both.py MODEL_FOLDER TASKS_FOLDER URL
"""

import json
import sys

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = ["ten_questions", "pages"]
WINDOW = 120  # tokens; of its own windows local-completions leaves two free


def evaluated(manager: TaskManager, kind: str, **arguments: object) -> dict:
    """The metrics of each task, and the log probabilities of each of its documents."""
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=TASKS, task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    samples = {
        task: [sample["filtered_resps"] for sample in sorted(found["samples"][task], key=lambda s: s["doc_id"])]
        for task in TASKS
    }
    metrics = {
        task: {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
        for task in TASKS
    }
    return {"metrics": metrics, "samples": samples}


def main(folder: str, tasks: str, url: str) -> None:
    """Evaluate and print."""
    manager = TaskManager(include_path=tasks, include_defaults=False)
    own = evaluated(manager, "hf", pretrained=folder, dtype="float32", device="cpu", max_length=WINDOW)
    served = evaluated(
        manager,
        "local-completions",
        model="small",
        base_url=f"{url}/v1/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        max_length=WINDOW + 2,
        num_concurrent=4,
    )
    print(json.dumps({"hf": own, "served": served}))


if __name__ == "__main__":
    main(*sys.argv[1:])
