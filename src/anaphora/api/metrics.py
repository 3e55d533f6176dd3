"""What Prometheus is told. Sums over all tenants only: nothing here names one."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)

from anaphora.engine.protocol import Done, EngineInfo, Started

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """The counters of one server."""

    def __init__(self, info: EngineInfo) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._model = Info("anaphora_model", "The loaded model.", registry=self._registry)
        self.show(info)
        self._requests = Counter(
            "anaphora_http_requests",
            "HTTP requests that were answered, by route and status code.",
            ("route", "code"),
            registry=self._registry,
        )
        self.waiting = self._gauge("requests_waiting", "Requests the engine has not begun.")
        self.running = self._gauge("requests_running", "Requests the engine works on.")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._read = self._counter("cache_read_tokens", "Prompt tokens read from the cache.")
        self._written = self._counter("cache_written_tokens", "Prompt tokens written to the cache.")
        self._computed = self._counter("computed_tokens", "Prompt tokens that were computed.")
        self._generated = self._counter("generated_tokens", "Tokens of answers.")
        self._found = Counter(
            "anaphora_cache_found_tokens",
            "Prompt tokens whose KV was reused, by where it lay.",
            ("tier",),
            registry=self._registry,
        )
        self._queued = self._histogram("queue_seconds", "From arrival to begin.")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to a token.")
        self._total = self._histogram("request_seconds", "From arrival to the end.")

    def show(self, info: EngineInfo) -> None:
        """Another model is loaded."""
        self._model.info({"engine": info.name, "model": info.model, "kind": info.kind})

    def count_response(self, route: str, code: int) -> None:
        self._requests.labels(route, str(code)).inc()

    def count_prompt(self, started: Started) -> None:
        self._prompt.inc(started.prompt_tokens)
        self._read.inc(started.read_tokens)
        self._written.inc(started.written_tokens)
        for tier in ("live", "memory", "disk"):
            self._found.labels(tier).inc(getattr(started.found, tier))

    def count_answer(self, done: Done) -> None:
        self._computed.inc(done.computed_tokens)
        self._generated.inc(done.generated_tokens)
        self._queued.observe(done.times.queued)
        self._total.observe(done.times.total)
        if done.generated_tokens:
            self._first.observe(done.times.first_token)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"anaphora_{name}", what, registry=self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"anaphora_{name}", what, registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"anaphora_{name}", what, buckets=_SECONDS, registry=self._registry)
