"""Metrics: their names, and that what is recorded is rendered."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cairn.system.metrics import TURN_STATES, AgentFigures, Metrics, Tally
from cairn.types.outputs import FinishReason, Timing
from cairn.types.stats import KvStats, TierStats

VLLM = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "iteration_tokens_total",
}


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    results = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k != "model_name"}
            results[sample.name, ",".join(rest.values())] = sample.value
    return results


@pytest.mark.parametrize("prefix", ["cairn", "vllm"])
def test_the_names_are_vllms(prefix: str) -> None:
    metrics = Metrics(prefix, "m")
    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert {f"{prefix}:{name}" for name in VLLM} <= names


def test_every_instrument_shows_what_was_recorded() -> None:
    """Known failure 46: metrics that are declared and never recorded."""
    metrics = Metrics("cairn", "m")
    before = samples(metrics)
    for name in ("running", "waiting", "kv_usage", "prefix_queries", "prefix_hits", "prompt_tokens"):
        setattr(metrics, name, 3)
    for name in (
        "prompt_tokens_cached",
        "generation_tokens",
        "generation_tokens_forced",
        "accepted_guesses",
        "rejected_guesses",
        "preemptions",
        "worker_restarts",
    ):
        setattr(metrics, name, 3)
    metrics.worker_failures = lambda: 3
    metrics.worker_still = lambda: 3.0
    metrics.prompt_tokens_loaded = {"ram": 3, "disk": 3, "shared": 3}
    metrics.misses = dict.fromkeys(metrics.misses, 3)
    figures = {name: 3 for name in TierStats.__struct_fields__ if name != "trouble"}
    tier = TierStats(**figures)
    counts = {name: 3 for name in KvStats.__struct_fields__ if name not in ("ram", "disk", "shared")}
    metrics.kv = KvStats(ram=tier, disk=tier, shared=tier, **counts)
    numbers = {name: 3 for name in AgentFigures.__struct_fields__ if name != "turns"}
    metrics.agents = lambda: AgentFigures(turns=dict.fromkeys(TURN_STATES, 3), **numbers)
    metrics.first_token.observe(0.1)
    metrics.inter_token.observe(0.1, 3)
    metrics.prompt_length.observe(100)
    metrics.step_tokens.observe(4)
    for reason in FinishReason:
        timing = Timing(queue=0.1, prefill=0.2, decode=0.3)
        metrics.record_end(reason, timing, total=0.6, first=0.3, generated=4, limit=8)
    after = samples(metrics)
    assert before.keys() == after.keys()
    quiet = {key[0] for key, value in after.items() if value == before[key] and not key[0].endswith("_bucket")}
    assert not quiet
    assert after["cairn:request_success_total", "deadline"] == 1
    assert after["cairn:inter_token_latency_seconds_count", ""] == 3
    assert after["cairn:inter_token_latency_seconds_sum", ""] == pytest.approx(0.3)


def test_the_only_labels_are_the_model_and_reasons() -> None:
    """Known failure 46: labels that grow without bound."""
    metrics = Metrics("cairn", "m")
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert set(sample.labels) <= {"model_name", "finished_reason", "reason", "state", "le"}
            assert sample.labels["model_name"] == "m"


def test_a_tally_counts_as_prometheus_does() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        tally.observe(value)
    assert tally.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert tally.count == 5
    assert tally.sum == 7.5


def test_counters_of_stores_go_on_when_a_worker_is_replaced() -> None:
    metrics = Metrics("cairn", "m")
    metrics.kv = KvStats(disk=TierStats(chunks=7, budget=9, written=100), dropped=2, load_seconds=0.5)
    metrics.running, metrics.waiting, metrics.kv_usage = 3, 2, 0.5
    metrics.worker_replaced()
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (0, 0, 0.0)
    result = samples(metrics)
    assert result["cairn:kv_disk_written_bytes_total", ""] == 100
    assert result["cairn:kv_disk_chunks", ""] == result["cairn:kv_disk_up", ""] == 0
    metrics.kv = KvStats(disk=TierStats(chunks=7, budget=9, written=11), dropped=1, load_seconds=0.25)
    result = samples(metrics)
    assert result["cairn:kv_disk_written_bytes_total", ""] == 111
    assert result["cairn:kv_chunks_dropped_total", ""] == 3
    assert result["cairn:kv_load_seconds_total", ""] == 0.75
    assert result["cairn:kv_disk_chunks", ""] == 7 and result["cairn:kv_disk_up", ""] == 1
    metrics.kv = KvStats(disk=TierStats(chunks=7, budget=9, trouble="the disk failed"))
    assert samples(metrics)["cairn:kv_disk_up", ""] == 0
