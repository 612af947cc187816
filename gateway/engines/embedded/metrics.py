"""/metrics under vLLM's names: the engine's statistics at the time of the scrape, and histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.engines.embedded.config import BLOCK_TOKENS, EngineConfig
from gateway.engines.embedded.engine import EngineStatistics

LABELS = ("model_name", "engine")

GAUGES: dict[str, tuple[str, Callable[[EngineStatistics], float]]] = {
    "vllm:num_requests_running": ("Sequences in the running batch.", lambda s: s.num_running),
    "vllm:num_requests_waiting": ("Sequences waiting for a place.", lambda s: s.num_waiting),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", lambda s: s.kv_usage),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStatistics], float]]] = {
    "vllm:num_preemptions": ("Sequences that gave up their KV for an older one.", lambda s: s.preemptions),
    "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    "vllm:prefix_cache_hits": ("Tokens found in the prefix cache.", lambda s: s.prefix_hits),
    "vllm:prompt_tokens": ("Prompt tokens accepted.", lambda s: s.prompt_tokens),
    "vllm:generation_tokens": ("Tokens sampled.", lambda s: s.generation_tokens),
}


class EngineMetrics:
    """One registry per server; `render` is the text exposition."""

    def __init__(self, config: EngineConfig, read: Callable[[], EngineStatistics]) -> None:
        self._config, self._read = config, read
        self._values = (config.served_model_name, "0")
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # its process_start_time_seconds identifies the incarnation
        self._success = Counter(
            "vllm:request_success", "Requests ended, by reason.", (*LABELS, "finished_reason"), registry=self._registry
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Between two deliveries of a request.")
        self._update = Histogram(
            "vllm:rl_weight_update_operation_duration_seconds",
            "Weight update operations.",
            (*LABELS, "operation"),
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, LABELS, registry=self._registry).labels(*self._values)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def request_ended(self, reason: str) -> None:
        self._success.labels(*self._values, reason).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def update_operation(self, operation: str, seconds: float) -> None:
        self._update.labels(*self._values, operation).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        statistics = self._read()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._values, value(statistics))
            yield gauge
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._values, value(statistics))
            yield counter
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "KV cache.", labels=("engine", "block_size", "num_gpu_blocks", "cache_dtype")
        )
        info.add_metric(("0", str(BLOCK_TOKENS), str(statistics.num_blocks), self._config.dtype), 1.0)
        yield info
