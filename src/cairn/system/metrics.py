"""The metrics of `/metrics`: vLLM's names under `cairn:` or `vllm:`, with the model as the only label.

Names and meanings follow vLLM's metrics page (docs.vllm.ai, usage/metrics), so that its dashboards work unchanged.
Nothing here grows with traffic: no label holds a path, a request or a client.

The instruments are our own and prometheus-client only renders them: a token costs one bisection for all requests
of a step, not one locked update for each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from cairn.types.outputs import FinishReason, Timing
from cairn.types.stats import KvStats, MissReason, TierStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of `Metrics.render()`."""

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 480.0, 1920.0)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
TURN_STATES = ("running", "finished", "interrupted")
_FEW_TOKENS = tuple(float(1 << power) for power in range(15))


class AgentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of agents and turns, and the totals of what caching saved; both survive restarts."""

    agents: int = 0
    turns: Mapping[str, int] = {}
    """Number of turns by state; a missing state counts 0."""
    log_bytes: int = 0
    log_dropped: int = 0
    """Log records that were dropped because the disk was too slow or refused them."""
    requests: int = 0
    computed: int = 0
    """Prompt tokens that were computed."""
    saved: int = 0
    """Prompt tokens that were not computed again."""
    seconds_avoided: float = 0.0
    read: int = 0
    """Bytes of KV read from the disk."""
    written: int = 0
    """Bytes of KV written to the disk."""


class Tally:
    """A histogram that one thread writes. `bounds` are inclusive upper bounds, as Prometheus defines them."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Number of observations so far."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of observations up to it) pairs, the last for +Inf."""
        pairs, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            pairs.append((bound, float(total)))
        return pairs


class Metrics:
    """The instruments of one served model. One thread writes; `render` may be called by another."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._model = model_name
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.token_seconds = 0.0
        """Seconds that the worker lately took for a token of a prompt; 0 before the first."""
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.generation_tokens_forced = 0
        self.accepted_guesses = 0
        self.rejected_guesses = 0
        self.preemptions = 0
        self.worker_restarts = 0
        self.worker_failures: Callable[[], int] = lambda: 0
        self.worker_still: Callable[[], float] = lambda: 0.0
        self.prompt_tokens_loaded = {"ram": 0, "disk": 0, "shared": 0}
        self.misses: dict[str, int] = dict.fromkeys(get_args(MissReason), 0)
        self.kv = KvStats()
        """Statistics of the present worker's stores below the pool."""
        self.agents: Callable[[], AgentFigures] = AgentFigures
        """Returns the figures of agents; called for each scrape."""
        self._ended = [0.0] * len(self._kv_counts())
        """Totals of earlier workers, in the order of `_kv_counts`."""
        self.finished = dict.fromkeys(FinishReason, 0)
        self.first_token = Tally(_SECONDS)
        self.inter_token = Tally(_SHORT_SECONDS)
        self.time_per_token = Tally(_SHORT_SECONDS)
        self.end_to_end = Tally(_LONG_SECONDS)
        self.queue = Tally(_LONG_SECONDS)
        self.prefill = Tally(_LONG_SECONDS)
        self.decode = Tally(_LONG_SECONDS)
        self.inference = Tally(_LONG_SECONDS)
        self.prompt_length = Tally(_TOKENS)
        self.generation_length = Tally(_TOKENS)
        self.max_tokens = Tally(_TOKENS)
        self.step_tokens = Tally(_FEW_TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def worker_replaced(self) -> None:
        """Reset the ended worker's gauges; add its counters to the totals of earlier workers."""
        self.running = self.waiting = 0
        self.kv_usage = 0.0
        self._ended = [old + new for old, (_, _, new) in zip(self._ended, self._kv_counts(), strict=True)]
        self.kv = KvStats()

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Bytes of KV (read from, written to) the disk by all workers of this process."""
        now = {name: value for name, _, value in self._kv_counts()}
        ended = dict(zip(now, self._ended, strict=True))
        read, written = "kv_disk_read_bytes", "kv_disk_written_bytes"
        return int(now[read] + ended[read]), int(now[written] + ended[written])

    @property
    def mean_seconds(self) -> float:
        """Mean seconds from a request's arrival to its end, at least 1."""
        return max(1.0, self.end_to_end.sum / max(1, self.end_to_end.count))

    def record_end(
        self, reason: FinishReason, timing: Timing, *, total: float, first: float | None, generated: int, limit: int
    ) -> None:
        """Count an ended request; `total` and `first` are seconds from arrival to its end and first token."""
        self.finished[reason] += 1
        self.end_to_end.observe(total)
        self.queue.observe(timing.queue)
        self.generation_length.observe(generated)
        self.max_tokens.observe(limit)
        if first is None:
            return
        self.prefill.observe(timing.prefill)
        self.decode.observe(timing.decode)
        self.inference.observe(timing.prefill + timing.decode)
        if generated > 1:
            self.time_per_token.observe((total - first) / (generated - 1))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, whose content type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; prometheus-client calls this for each scrape."""
        yield from self._plain()
        yield from self._agent_families(self.agents())
        yield from self._histograms()

    def of_model(self) -> Iterator[Metric]:
        """Yield the model's metrics, without the server's own about agents."""
        yield from self._plain()
        yield from self._histograms()

    def _plain(self) -> Iterator[Metric]:
        for name, text, value in self._gauges():
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        for name, text, value in self._counters():
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        success = CounterMetricFamily(
            f"{self._prefix}:request_success",
            "Requests that ended, by reason.",
            labels=("model_name", "finished_reason"),
        )
        for reason, count in self.finished.items():
            success.add_metric((self._model, reason.value), count)
        yield success
        misses = CounterMetricFamily(
            f"{self._prefix}:prefix_cache_misses",
            "Prompts of which a full block had to be computed, by the reason of the first.",
            labels=("model_name", "reason"),
        )
        for why, count in self.misses.items():
            misses.add_metric((self._model, why), count)
        yield misses

    def _histograms(self) -> Iterator[Metric]:
        for name, text, tally in self._tallies():
            histogram = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
            histogram.add_metric((self._model,), tally.buckets(), tally.sum)
            yield histogram

    def _agent_families(self, figures: AgentFigures) -> Iterator[Metric]:
        for name, text, value in (
            ("agents", "Agents that are kept.", figures.agents),
            ("agent_log_bytes", "Bytes that the token log takes on the disk.", figures.log_bytes),
        ):
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        turns = GaugeMetricFamily(
            f"{self._prefix}:agent_turns", "Turns that are kept, by state.", labels=("model_name", "state")
        )
        for state in TURN_STATES:
            turns.add_metric((self._model, state), figures.turns.get(state, 0))
        yield turns
        for name, text, total in (
            ("agent_log_dropped_records", "Records that the token log did not take.", figures.log_dropped),
            ("ledger_requests", "Answers that the savings ledger counts.", figures.requests),
            ("ledger_computed_tokens", "Prompt tokens that were computed for them.", figures.computed),
            ("ledger_saved_tokens", "Prompt tokens that were not computed again.", figures.saved),
            ("ledger_saved_prefill_seconds", "Prefill that this avoided, less the loading.", figures.seconds_avoided),
            ("ledger_read_bytes", "Bytes of KV read from the disk since the ledger began.", figures.read),
            ("ledger_written_bytes", "Bytes of KV written to the disk since then.", figures.written),
        ):
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
            counter.add_metric((self._model,), total)
            yield counter

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        yield "num_requests_running", "Requests being computed.", self.running
        yield "num_requests_waiting", "Requests waiting to be computed.", self.waiting
        yield "kv_cache_usage_perc", "Share of the KV pool that requests hold; 1 is all of it.", self.kv_usage
        yield (
            "worker_failures",
            "Workers that ended in a row without being of use; 0 while one is up.",
            self.worker_failures(),
        )
        yield (
            "worker_still_seconds",
            "Time since the worker, which has work, last got on; a step that computes counts as getting on.",
            self.worker_still(),
        )
        disk, ram = self.kv.disk or TierStats(), self.kv.ram or TierStats()
        yield "kv_disk_chunks", "Chunks of KV on the disk.", disk.chunks
        yield "kv_disk_bytes", "Bytes that the KV on the disk takes.", disk.bytes
        yield "kv_disk_budget_bytes", "Bytes that it may take.", disk.budget
        yield "kv_disk_pinned_chunks", "Chunks on the disk that may not be evicted.", disk.pinned
        yield "kv_disk_up", "1 where KV is kept on the disk and the disk works.", disk.budget > 0 and not disk.trouble
        yield "kv_ram_chunks", "Chunks of KV in host memory.", ram.chunks
        yield "kv_ram_bytes", "Bytes that they take.", ram.bytes
        shared = self.kv.shared or TierStats()
        yield "kv_shared_chunks", "Chunks of KV known to be in the shared store.", shared.chunks
        up = self.kv.shared is not None and not shared.trouble
        yield "kv_shared_up", "1 where replicas share a store and it works.", up
        yield "kv_queued_chunks", "Chunks that wait to be stored.", self.kv.queued

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self.prefix_queries
        yield "prefix_cache_hits", "Prompt tokens found in the prefix cache.", self.prefix_hits
        yield "prompt_tokens", "Prompt tokens processed.", self.prompt_tokens
        yield "prompt_tokens_cached", "Prompt tokens that were not computed again.", self.prompt_tokens_cached
        yield "generation_tokens", "Tokens generated.", self.generation_tokens
        forced = "Generated tokens that a grammar left no choice about, and that had no step of their own."
        yield "generation_tokens_forced", forced, self.generation_tokens_forced
        guesses = self.accepted_guesses + self.rejected_guesses
        yield "spec_decode_num_draft_tokens", "Guesses of the next tokens that steps checked.", guesses
        yield (
            "spec_decode_num_accepted_tokens",
            "Guesses that were right: tokens without a step.",
            self.accepted_guesses,
        )
        yield "num_preemptions", "Requests sent back to wait because the KV pool was full.", self.preemptions
        yield "worker_restarts", "Times the worker process was replaced.", self.worker_restarts
        loaded = self.prompt_tokens_loaded
        yield "prompt_tokens_from_ram", "Prompt tokens whose KV came from host memory.", loaded["ram"]
        yield "prompt_tokens_from_disk", "Prompt tokens whose KV came from the disk.", loaded["disk"]
        shared = "Prompt tokens whose KV came from the store that replicas share."
        yield "prompt_tokens_from_shared", shared, loaded["shared"]
        for (name, text, now), ended in zip(self._kv_counts(), self._ended, strict=True):
            yield name, text, now + ended

    def _kv_counts(self) -> list[tuple[str, str, float]]:
        """Return (name, help, total) of the counters of the present worker's stores."""
        kv, disk, shared = self.kv, self.kv.disk or TierStats(), self.kv.shared or TierStats()
        return [
            ("kv_loaded_tokens", "Tokens whose KV was brought up into the pool.", kv.loaded),
            ("kv_load_seconds", "Time that contexts waited for that.", kv.load_seconds),
            ("kv_loads_abandoned", "Loads that ended early.", kv.abandoned),
            ("kv_chunks_dropped", "Chunks given up before they were stored.", kv.dropped),
            ("kv_chunks_deferred", "Chunks not stored: the day's bytes were written.", kv.deferred),
            ("kv_disk_written_bytes", "Bytes of KV written to the disk.", disk.written),
            ("kv_disk_read_bytes", "Bytes of KV read from the disk.", disk.read),
            ("kv_disk_evicted_chunks", "Chunks evicted from the disk.", disk.evicted),
            ("kv_disk_damaged_chunks", "Chunks on the disk that failed a check.", disk.damaged),
            ("kv_disk_refused_chunks", "Chunks that the disk did not keep.", disk.refused),
            ("kv_shared_written_bytes", "Bytes of KV written to the shared store.", shared.written),
            ("kv_shared_read_bytes", "Bytes of KV read from the shared store.", shared.read),
            ("kv_shared_damaged_chunks", "Chunks of the shared store that failed a check.", shared.damaged),
            ("kv_shared_refused_chunks", "Chunks given up while the shared store was slow or gone.", shared.refused),
        ]

    def _tallies(self) -> Iterator[tuple[str, str, Tally]]:
        yield "time_to_first_token_seconds", "From arrival to the first token.", self.first_token
        yield "inter_token_latency_seconds", "Between two tokens of a request.", self.inter_token
        yield "request_time_per_output_token_seconds", "Mean time of a token after the first.", self.time_per_token
        yield "e2e_request_latency_seconds", "From arrival to the end.", self.end_to_end
        yield "request_queue_time_seconds", "Waiting to be computed.", self.queue
        yield "request_prefill_time_seconds", "Computing the prompt.", self.prefill
        yield "request_decode_time_seconds", "Generating.", self.decode
        yield "request_inference_time_seconds", "Computing the prompt and generating.", self.inference
        yield "request_prompt_tokens", "Prompt tokens of a request.", self.prompt_length
        yield "request_generation_tokens", "Generated tokens of a request.", self.generation_length
        yield "request_params_max_tokens", "max_tokens of a request.", self.max_tokens
        yield "iteration_tokens_total", "Tokens generated in a step, all requests together.", self.step_tokens


class ServerMetrics:
    """The metrics of all models of a server in one text: each name once, with the samples of every model."""

    def __init__(
        self,
        prefix: str,
        models: Callable[[], Sequence[Metrics]],
        more: Callable[[], Iterable[tuple[str, str, str, list[tuple[str, float]]]]],
    ) -> None:
        """Collect the metrics of the loaded models; the first also reports agents.

        `more` yields metrics that belong to no worker: kind, name, help, and (model's name, value) pairs.
        """
        self._prefix, self._models, self._more = prefix, models, more
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, whose content type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; prometheus-client calls this for each scrape."""
        found: dict[str, Metric] = {}
        for number, model in enumerate(self._models()):
            for family in model.collect() if not number else model.of_model():
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        yield from found.values()
        for kind, name, text, values in self._more():
            made = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
            one = made(f"{self._prefix}:{name}", text, labels=("model_name",))
            for model_name, value in values:
                one.add_metric((model_name,), value)
            yield one
