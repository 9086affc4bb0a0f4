"""Metrics: the names that vLLM's dashboard queries, with the values that clients count; and the log line."""

from __future__ import annotations

import copy

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.scripted import MODEL, RunningServer, script

from foredraft.engine.stats import AcceptanceStats
from foredraft.serve.activity import activity_line

# Those of the dashboard in vLLM's repository (examples/observability/prometheus_grafana) first.
VLLM_NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "foredraft:mean_acceptance_length",
    "foredraft:draft_length_bucket",
    "foredraft:draft_seconds_sum",
    "foredraft:verify_seconds_sum",
    "foredraft:parked_requests",
)


def read(server: RunningServer) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx2.get(server.url + "/metrics").text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[sample.name + (str(sorted(labels.items())) if labels and "le" not in labels else "")] = sample.value
            found.setdefault(sample.name, sample.value)
    return found


def test_values_are_what_the_client_counted() -> None:
    with RunningServer() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert all(name in read(server) or "per_pos" in name for name in VLLM_NAMES)
        usages, reasons = [], []
        for index in range(6):
            messages = [{"role": "user", "content": script(f"tick tack tick tack tick {index}")}]
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, n=1 + index % 2, max_tokens=20 + index
            )
            usages.append(answer.usage)
            reasons += [choice.finish_reason for choice in answer.choices]
        stream = client.completions.create(
            model=MODEL, prompt=[script("x"), script("y")], stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        server.wait_until_idle()
        found = read(server)
    assert all(name in found for name in VLLM_NAMES)
    assert found["vllm:prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
    assert found["vllm:generation_tokens_total"] == sum(usage.completion_tokens for usage in usages)
    for reason in ("stop", "length"):
        assert found[f"vllm:request_success_total[('finished_reason', '{reason}')]"] == reasons.count(reason)
    assert found["vllm:e2e_request_latency_seconds_count"] == 8  # prompts
    assert found["vllm:request_prompt_tokens_sum"] == found["vllm:prompt_tokens_total"]
    assert found["vllm:request_generation_tokens_sum"] == found["vllm:generation_tokens_total"]
    assert 0 < found["vllm:request_max_num_generation_tokens_sum"] < found["vllm:generation_tokens_total"]
    assert found["vllm:request_prompt_tokens_count"] == found["vllm:request_max_num_generation_tokens_count"] == 8
    parts = [found[f"vllm:request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(found["vllm:e2e_request_latency_seconds_sum"])
    assert sum(parts[:2]) == pytest.approx(found["vllm:time_to_first_token_seconds_sum"])
    drafted = sum(usage.speculation["draft_tokens"] for usage in usages)
    accepted = sum(usage.speculation["accepted_tokens"] for usage in usages)
    assert drafted > accepted > 0
    assert found["vllm:spec_decode_num_draft_tokens_total"] == drafted
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    by_place = [
        value for name, value in found.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total[")
    ]
    assert sum(by_place) == accepted
    assert found["foredraft:draft_length_sum"] == drafted
    assert found["foredraft:draft_length_count"] == sum(usage.speculation["steps"] for usage in usages)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0
    # A prompt of several choices is found once more for each of them, and told of once.
    assert found["vllm:prefix_cache_hits_total"] >= sum(usage.prompt_tokens_details.cached_tokens for usage in usages)


def test_every_figure_names_its_model(served: RunningServer) -> None:
    for family in text_string_to_metric_families(httpx2.get(served.url + "/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL, sample.name


def test_the_log_line(served: RunningServer, post) -> None:
    before = copy.copy(served.llm.engine.stats)
    post("/v1/completions", {"model": MODEL, "prompt": script("la la la la la la"), "max_tokens": 40})
    line = activity_line(served.state, before, served.llm.engine.stats, 12.34)
    assert line.startswith("running 0, waiting 0, 12.3 tokens/s, acceptance rate ")
    assert "mean acceptance length" in line
    assert "chosen γ" in line
    assert "none drafted" in activity_line(served.state, AcceptanceStats(), AcceptanceStats(), 0.0)
