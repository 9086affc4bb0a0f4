"""Prometheus metrics under the names that dashboards for vLLM query, and a few of our own.

What the engine counts anyway is read when somebody asks; only times are observed as they happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from foredraft.engine.outputs import RequestOutput
from foredraft.engine.request import Request
from foredraft.engine.step import Engine

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKENS = tuple(power * digit for power in (1, 10, 100, 1000, 10_000, 100_000) for digit in (1, 2, 5))
FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "abort", "error")


class Metrics:
    """The figures of one server; the engine's thread calls `on_step`, the event loop the rest.

    Args:
        model: the name that the figures carry.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self.num_generated = 0
        """Tokens given to sequences so far."""
        self._delivered: dict[Request, tuple[int, float | None]] = {}
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to first token", FIRST_TOKEN
        )
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two deliveries of a sequence", PER_TOKEN
        )
        self.per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time per token after its first", PER_TOKEN
        )
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to last token", LATENCY)
        about = {"queue": "arrival to first step", "prefill": "first step to first token", "decode": "the rest"}
        self.phases = {
            phase: self._histogram(f"vllm:request_{phase}_time_seconds", f"Of a request, {told}", LATENCY)
            for phase, told in about.items()
        }
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.output_length = self._histogram("vllm:request_generation_tokens", "Tokens given to a request", TOKENS)
        self.longest_output = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest sequence", TOKENS
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens taken")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens given to sequences")
        self._success = Counter(
            "vllm:request_success",
            "Finished choices by reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in FINISH_REASONS:
            self._success.labels(model, reason)
        self.unknown_fields = self._counter("foredraft:unknown_request_fields", "Request fields that were ignored")
        self.blocked_inputs = self._counter("foredraft:blocked_inputs", "Requests that a guard refused")
        self.blocked_outputs = self._counter("foredraft:blocked_outputs", "Choices that a guard ended")

    def watch(self, engine: Engine) -> None:
        """Reads an engine's own counts from now on."""
        self.registry.register(_EngineCollector(engine, self._model))

    def on_step(self, changed: Sequence[Request]) -> None:
        """Observes what a step gave, and requests that ended otherwise; on the engine's thread."""
        now = perf_counter()
        for request in changed:
            before, last = self._delivered.get(request, (0, None))
            new = request.num_output_tokens - before
            if new:
                self.num_generated += new
                self._generation_tokens.inc(new)
                if last is not None:
                    self.inter_token.observe(now - last)
            if request.finished:
                self._delivered.pop(request, None)
            elif new:
                self._delivered[request] = (request.num_output_tokens, now)

    def started(self, num_prompt_tokens: int) -> None:
        """Counts a prompt that was taken."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def finished(self, output: RequestOutput, reasons: Iterable[str], num_generated: Sequence[int]) -> None:
        """Observes a finished prompt: its times, why each choice ended, and the tokens of each of its sequences."""
        times = output.times
        for phase, seconds in (("queue", times.queued), ("prefill", times.prefill), ("decode", times.decode)):
            if seconds is not None:
                self.phases[phase].observe(seconds)
        self.prompt_length.observe(len(output.prompt_token_ids))
        self.output_length.observe(sum(num_generated))
        self.longest_output.observe(max(num_generated))
        if times.ttft is not None:
            self.first_token.observe(times.ttft)
        if times.latency is not None:
            self.latency.observe(times.latency)
            longest = sum(num_generated) / max(1, len(output.outputs))
            if times.ttft is not None and longest > 1:
                self.per_output_token.observe((times.latency - times.ttft) / (longest - 1))
        for reason in reasons:
            self._success.labels(self._model, reason).inc()

    def aborted(self, count: int) -> None:
        """Counts sequences that nobody waited for."""
        self._success.labels(self._model, "abort").inc(count)

    def text(self) -> bytes:
        """The exposition that Prometheus reads."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, about, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._model)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, ["model_name"], registry=self.registry).labels(self._model)


class _EngineCollector:
    """The engine's counts, read at the time of a scrape."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._labels = (["model_name"], [model])

    def collect(self) -> Iterable[Metric]:
        engine, scheduler = self._engine, self._engine.scheduler
        stats, times, pool = engine.stats, engine.times, scheduler.pool
        yield self._gauge("vllm:num_requests_running", "Sequences that run", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait", len(scheduler.waiting))
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV-cache blocks in use", pool.num_used / pool.num_blocks
        )
        yield self._counter("vllm:num_preemptions", "Sequences that gave way", scheduler.num_preemptions)
        prefix = scheduler.prefix_stats
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up", prefix.num_queried_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found", prefix.num_hit_tokens)
        lengths = list(stats.steps_per_draft_length)
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts verified", sum(lengths[1:]))
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", stats.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted", stats.num_accepted_tokens)
        names, values = self._labels
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted, by place in the draft",
            labels=[*names, "position"],
        )
        for position, count in enumerate(list(stats.accepted_per_position)):
            by_position.add_metric([*values, str(position)], count)
        yield by_position
        yield self._gauge(
            "foredraft:mean_acceptance_length", "Tokens per target forward of a sequence", stats.mean_acceptance_length
        )
        yield self._lengths(lengths)
        for name, seconds in (("draft", times.draft), ("verify", times.forward + times.sample)):
            about = f"Seconds of steps spent in {name}ing"
            summary = SummaryMetricFamily(f"foredraft:{name}_seconds", about, labels=names)
            summary.add_metric(values, count_value=times.num_steps, sum_value=seconds)
            yield summary
        yield self._gauge(
            "foredraft:parked_requests", "Sequences whose drafts do not pay now", engine.lengths.num_parked
        )

    def _lengths(self, lengths: Sequence[int]) -> Metric:
        family = HistogramMetricFamily(
            "foredraft:draft_length", "Draft tokens verified in a step", labels=self._labels[0]
        )
        buckets, total = [], 0
        for length, count in enumerate(lengths):
            total += count
            buckets.append((str(float(length)), float(total)))
        buckets.append(("+Inf", float(total)))
        family.add_metric(self._labels[1], buckets, sum(length * count for length, count in enumerate(lengths)))
        return family

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=self._labels[0])
        family.add_metric(self._labels[1], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=self._labels[0])
        family.add_metric(self._labels[1], value)
        return family
