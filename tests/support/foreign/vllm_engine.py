"""The real vLLM in a process of its own, told what to do in lines of JSON: vllm_engine.py MODEL KV_TRANSFER_CONFIG
OPTIONS BEFORE.

Runs in the environment that install.py makes. *BEFORE* is Python that runs first. Each line in is {"do": ..., ...},
each line out its answer.
"""

import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is in this process, and can be looked at
    "VLLM_LOGGING_LEVEL": "WARNING",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "LMCACHE_TRACK_USAGE": "false",
}.items():
    os.environ.setdefault(name, value)

from prometheus_client import REGISTRY  # noqa: E402  # vLLM sets it up
from prometheus_client.samples import Sample  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402  # they read the environment
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

OFFLOADING = "vllm:kv_offload_"  # those of vLLM's offloading
NAMED_FRAMES = 3  # of where an engine has ended
MAX_TOKENS = 1000  # of a request that is aborted before
MAX_STEPS = 50  # without a request, until the last one's blocks are let go
SETTLES_WITHIN_S = 120.0  # a disk that has not written by then hangs


class Engine:
    """One vLLM engine, and how many tokens each of its steps computes."""

    def __init__(self, model: str, transfer: dict, **arguments: object) -> None:
        self.llm = LLM(
            model,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **{
                "enforce_eager": True,
                "enable_prefix_caching": True,
                "max_model_len": 10240,
                "max_num_batched_tokens": 2048,
                "max_num_seqs": 4,
                "seed": 0,
                "disable_log_stats": False,  # they have the time of the first token
                "kv_cache_memory_bytes": 64 << 20,
                "dtype": "float32",
                "disable_hybrid_kv_cache_manager": True,
                **arguments,
            },
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduled: list[int] = []
        self.hooks_s = self.slowest_hooks_s = 0.0  # in the connector: of this step, and of the slowest one
        self.computing_since: float | None = None  # the first step of a request that computes
        self.steps_before = 0  # the first one of a request that computes
        self.cpu_s = time.process_time()  # when it answered last
        schedule = self.core.scheduler.schedule

        def recorded(*arguments: object, **options: object) -> object:
            began_at = time.monotonic()
            self.hooks_s = 0.0
            output = schedule(*arguments, **options)
            self.steps_before += self.computing_since is None and not output.num_scheduled_tokens
            if output.num_scheduled_tokens:
                self.computing_since = self.computing_since or began_at
                self.scheduled.append(sum(output.num_scheduled_tokens.values()))
            return output

        self.core.scheduler.schedule = recorded
        if transfer:
            self.time_hooks(self.core.scheduler.connector)
            if has_kv_transfer_group():  # several ranks are processes of their own
                self.time_hooks(get_kv_transfer_group())

    def time_hooks(self, connector: object) -> None:
        """Have the seconds of each hook added up, by step."""
        for name in dir(KVConnectorBase_V1):
            hook = getattr(connector, name)
            if name.startswith("_") or not inspect.ismethod(hook):
                continue

            def timed(*arguments: object, hook: Callable = hook, **options: object) -> object:
                began_at = time.monotonic()
                try:
                    return hook(*arguments, **options)
                finally:
                    self.hooks_s += time.monotonic() - began_at
                    self.slowest_hooks_s = max(self.slowest_hooks_s, self.hooks_s)

            setattr(connector, name, timed)

    def generate(
        self, prompts: list[list[int]], num_tokens: int, salt: str | None = None, adapter: str | None = None
    ) -> dict:
        """Greedy tokens; also how many tokens were computed before the first one was there, seconds until then, how
        long nothing was computed at first, the longest that the connector took of a step, and the CPU seconds of this
        process since it answered last."""
        parameters = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        self.scheduled.clear()
        self.slowest_hooks_s, self.computing_since = 0.0, None
        self.steps_before = 0
        lora = LoRARequest("adapter", 1, adapter) if adapter else None
        num_preemptions = self._metric("vllm:num_preemptions")
        began_at = time.monotonic()
        outputs = self.llm.generate(requests, parameters, use_tqdm=False, lora_request=lora)
        took_s = time.monotonic() - began_at
        self.step_after()
        cpu_s_before, self.cpu_s = self.cpu_s, time.process_time()
        return {
            "cpu_s": self.cpu_s - cpu_s_before,
            "waited_s": (self.computing_since or began_at) - began_at,
            "steps_before": self.steps_before,
            "slowest_hooks_s": self.slowest_hooks_s,
            "preemptions": self._metric("vllm:num_preemptions") - num_preemptions,
            "took_s": took_s,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "finish": [output.outputs[0].finish_reason for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "scheduled": sum(self.scheduled) - sum(len(output.outputs[0].token_ids) - 1 for output in outputs),
            "ttft_s": [output.metrics.first_token_latency for output in outputs],
        }

    def step_after(self) -> None:
        """Take the step after the last request has ended, as vLLM's own process does and `LLM.generate` does not."""
        if self.core.scheduler.has_finished_requests():
            self.llm.llm_engine.step()

    def beside(self, decoding: list[int], prompts: list[list[int]]) -> dict:
        """Have one token of each of the prompts, one after the other, while the prompt *decoding* goes on, a token a
        step: seconds until their first tokens, between two tokens of the other, and in hooks of each step."""
        engine, at_once = self.llm.llm_engine, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        parameters = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        engine.add_request("decoding", {"prompt_token_ids": decoding}, parameters)
        while not engine.step():
            pass
        gaps_s: list[float] = []
        hooks_s: list[float] = []
        ttft_s: list[float] = []
        for number, prompt in enumerate(prompts):
            told_at = asked_at = time.monotonic()
            engine.add_request(str(number), {"prompt_token_ids": prompt}, at_once)
            is_over, num_after = False, 0
            while not is_over or num_after < 2:  # two steps more: what the prompt leaves to be done is in them
                outputs = {output.request_id: output for output in engine.step()}
                hooks_s.append(self.hooks_s)
                if "decoding" in outputs:
                    gaps_s.append(time.monotonic() - told_at)
                    told_at = time.monotonic()
                num_after += is_over
                if str(number) in outputs and not is_over:
                    is_over = True
                    ttft_s.append(time.monotonic() - asked_at)
        engine.abort_request(["decoding"])
        self.step_after()
        return {"ttft_s": ttft_s, "gaps_s": gaps_s, "hooks_s": hooks_s}

    def reset(self) -> dict:
        """Forget the engine's own prefix cache."""
        for _ in range(MAX_STEPS):
            self.core.step_fn()
            if self.llm.reset_prefix_cache():
                return {"reset": True}
        return {"reset": False}

    def settle(self) -> dict:
        """Step until vLLM's offloading has nothing under way."""
        give_up_at = time.monotonic() + SETTLES_WITHIN_S
        while self.core.scheduler.has_requests() and time.monotonic() < give_up_at:
            self.llm.llm_engine.step()  # which takes in what vLLM tells its metrics
        return {"settled": not self.core.scheduler.has_requests()}

    def forget(self) -> dict:
        """Forget the engine's own prefix cache, and what vLLM's offloading has in host memory. The tiers below that are
        not told of it: they would take it for an update of weights."""
        manager = self.core.scheduler.connector.connector_scheduler.manager
        below = getattr(manager, "secondary_tiers", None)
        if below is None:
            return self.reset_all()
        manager.secondary_tiers = []
        try:
            return self.reset_all()
        finally:
            manager.secondary_tiers = below

    def reset_all(self) -> dict:
        """Forget the engine's own prefix cache, and all that its connector has."""
        return {"reset": self.llm.reset_prefix_cache(reset_connector=True)}

    def reload(self, path: str) -> dict:
        """Load other weights into the model that runs, as reinforcement learning does."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        return {"reloaded": path}

    def offloading(self) -> dict:
        """What vLLM's offloading has counted, by tier where it has several, less what is 0."""
        named = {f"{each.name} {each.labels.get('tier', '')}".strip(): each.value for each in samples(OFFLOADING)}
        return {name.removeprefix(OFFLOADING): value for name, value in named.items() if value}

    def counts(self, prefix: str) -> dict:
        """What is counted under names with that beginning, and reasons behind them, less what is 0."""
        named = {f"{each.name} {each.labels.get('reason', '')}".strip(): each.value for each in samples(prefix)}
        return {name.removeprefix(prefix): int(value) for name, value in named.items() if value}

    def standing(self) -> dict:
        """Whether our connector has a sidecar, and how often it has attached to one."""
        return {"num_attached": self.core.scheduler.connector.standing().num_attached}

    def _metric(self, name: str) -> float:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def connector(self) -> dict:
        """Which class is attached, and which LMCache is imported, if any is."""
        kind = type(self.core.scheduler.connector)
        lmcache = sys.modules.get("lmcache._version")
        return {"connector": f"{kind.__module__}.{kind.__name__}", "lmcache": getattr(lmcache, "__version__", None)}


def samples(prefix: str) -> list[Sample]:
    """What vLLM's registry has now under names with that beginning, `_total` left out."""
    every = [sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name.startswith(prefix)]
    kept = [sample for sample in every if not sample.name.endswith(("_created", "_bucket"))]
    return [sample._replace(name=sample.name.removesuffix("_total")) for sample in kept]


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    model, transfer, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    exec(sys.argv[4], {})
    try:
        engine = Engine(model, transfer, **options)
    except Exception as error:
        print(json.dumps({"ended": f"ended at its start: {error}", "where": where(error)}), file=answers)
        os._exit(1)
    print(json.dumps({"ready": True, **engine.connector()}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(engine, request.pop("do"))(**request)
        except Exception as error:  # vLLM's own processes end with it
            print(json.dumps({"ended": f"{type(error).__name__}: {error}", "where": where(error)}), file=answers)
            os._exit(1)
        print(json.dumps(answer), file=answers)
    os._exit(0)  # some of vLLM's threads do not end


def where(error: Exception) -> str:
    """The innermost functions that the error came through, the last one first."""
    frames = traceback.extract_tb(error.__traceback__)[-NAMED_FRAMES:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))


if __name__ == "__main__":
    main()
