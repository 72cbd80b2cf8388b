"""ServedRequests: latency and size histograms of requests, in the buckets of vLLM's dashboards."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.histogram import Histogram, HistogramStatistics

# Bounds of vLLM's histograms, because its dashboards query single buckets by their bound, such as 0.25. Those of the
# token gap begin with three smaller ones, so that the quantiles of fast models can be told apart.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.001, 0.002, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class ServedStatistics:
    """Counts and histograms since the start, with times in seconds.

    *ttft*, *token_gap* and *num_generated* cover all tokens so far. The other fields cover finished requests.
    """

    ttft: HistogramStatistics
    token_gap: HistogramStatistics
    num_generated: int
    finished: Mapping[str, int]  # requests by finish reason
    total: HistogramStatistics
    queue: HistogramStatistics
    prefill: HistogramStatistics  # from leaving the queue to the first token, including the load of the prefix
    decode: HistogramStatistics  # from the first token to the last
    per_token: HistogramStatistics  # mean of *decode* per token of each request
    prompt_tokens: HistogramStatistics
    computed_tokens: HistogramStatistics  # computed tokens of the prompt
    generated_tokens: HistogramStatistics


class ServedRequests:
    """Histograms over tokens and finished requests. Owned by the engine's thread.

    Counting a token takes half a microsecond.
    """

    def __init__(self) -> None:
        self._ttft, self._token_gap, self._per_token = (
            Histogram(bounds) for bounds in (FIRST_TOKEN_S, TOKEN_GAP_S, TOKEN_GAP_S)
        )
        self._total, self._queue, self._prefill, self._decode = (Histogram(REQUEST_S) for _ in range(4))
        self._prompt, self._computed, self._generated = (Histogram(TOKENS) for _ in range(3))
        self._num_generated = 0
        self._finished: Counter[str] = Counter()

    def on_first_token(self, ttft_s: float) -> None:
        """Count a request's first token."""
        self._num_generated += 1
        self._ttft.add(ttft_s)

    def on_token(self, token_gap_s: float) -> None:
        """Count a token other than a request's first, *token_gap_s* seconds after the request's previous token."""
        self._num_generated += 1
        self._token_gap.add(token_gap_s)

    def on_record(self, record: RequestRecord) -> None:
        """Count a finished request, and the times of the stages that it reached."""
        self._finished[str(record.finish_reason)] += 1
        self._prompt.add(record.tokens.num_tokens)
        self._computed.add(record.tokens.recomputed)
        num_generated = record.num_generated or 0
        self._generated.add(num_generated)
        if record.queue_s is not None:
            self._queue.add(record.queue_s)
        if record.total_s is None:
            return
        self._total.add(record.total_s)
        if record.ttft_s is not None:
            self._prefill.add(record.ttft_s - (record.queue_s or 0.0))
            decode_s = record.total_s - record.ttft_s
            self._decode.add(decode_s)
            self._per_token.add(decode_s / max(1, num_generated - 1))

    def statistics(self) -> ServedStatistics:
        """Return a snapshot of the current counts."""
        return ServedStatistics(
            self._ttft.statistics(),
            self._token_gap.statistics(),
            self._num_generated,
            dict(self._finished),
            self._total.statistics(),
            self._queue.statistics(),
            self._prefill.statistics(),
            self._decode.statistics(),
            self._per_token.statistics(),
            self._prompt.statistics(),
            self._computed.statistics(),
            self._generated.statistics(),
        )
