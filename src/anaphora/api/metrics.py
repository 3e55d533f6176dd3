"""What Prometheus is told. Whatever comes of a request carries the name of its tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from anaphora.engine.protocol import Done, EngineInfo, Started

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TENANT = "tenant"


class Metrics:
    """The counters of one server.

    :param lost_rows: how many rows of the ledger were lost so far, by tenant.
    """

    def __init__(self, info: EngineInfo, lost_rows: Callable[[], Mapping[str, int]]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._model = Info("anaphora_model", "The loaded model.", registry=self._registry)
        self.show(info)
        self._requests = self._counter(
            "http_requests",
            "HTTP requests that were answered, by route and status code.",
            ("route", "code"),
        )
        self._waiting = self._gauge("requests_waiting", "Requests the engine has not begun.")
        self._running = self._gauge("requests_running", "Requests the engine works on.")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._read = self._counter("cache_read_tokens", "Prompt tokens read from the cache.")
        self._written = self._counter("cache_written_tokens", "Prompt tokens written to the cache.")
        self._computed = self._counter("computed_tokens", "Prompt tokens that were computed.")
        self._generated = self._counter("generated_tokens", "Tokens of answers.")
        self._found = self._counter(
            "cache_found_tokens", "Prompt tokens whose KV was reused, by where it lay.", ("tier",)
        )
        self._lost_responses = self._counter(
            "responses_lost", "Responses that were to be stored and could not be."
        )
        self._registry.register(_LostRows(lost_rows))
        self._queued = self._histogram("queue_seconds", "From arrival to begin.")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to a token.")
        self._total = self._histogram("request_seconds", "From arrival to the end.")

    def show(self, info: EngineInfo) -> None:
        """Another model is loaded."""
        self._model.info({"engine": info.name, "model": info.model, "kind": info.kind})

    def count_response(self, tenant: str, route: str, code: int) -> None:
        """``tenant`` is empty where no valid key was shown, or none asked for."""
        self._requests.labels(tenant, route, str(code)).inc()

    def count_waiting(self, tenant: str, change: int) -> None:
        self._waiting.labels(tenant).inc(change)

    def count_running(self, tenant: str, change: int) -> None:
        self._running.labels(tenant).inc(change)

    def count_prompt(self, tenant: str, started: Started) -> None:
        self._prompt.labels(tenant).inc(started.prompt_tokens)
        self._read.labels(tenant).inc(started.read_tokens)
        self._written.labels(tenant).inc(started.written_tokens)
        for tier in ("live", "memory", "disk"):
            self._found.labels(tenant, tier).inc(getattr(started.found, tier))

    def count_answer(self, tenant: str, done: Done) -> None:
        self._computed.labels(tenant).inc(done.computed_tokens)
        self._generated.labels(tenant).inc(done.generated_tokens)
        self._queued.labels(tenant).observe(done.times.queued)
        self._total.labels(tenant).observe(done.times.total)
        if done.generated_tokens:
            self._first.labels(tenant).observe(done.times.first_token)

    def count_lost_response(self, tenant: str) -> None:
        self._lost_responses.labels(tenant).inc()

    def text(self, tenant: str | None = None) -> bytes:
        """In Prometheus' text format: all of it, or what belongs to one ``tenant``."""
        return generate_latest(self._registry if tenant is None else _Own(self._registry, tenant))

    def _counter(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"anaphora_{name}", what, (_TENANT, *labels), registry=self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"anaphora_{name}", what, (_TENANT,), registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(
            f"anaphora_{name}", what, (_TENANT,), buckets=_SECONDS, registry=self._registry
        )


class _LostRows(Collector):
    """What the ledger counts itself, since it loses rows on a thread of its own."""

    def __init__(self, lost_rows: Callable[[], Mapping[str, int]]) -> None:
        self._lost_rows = lost_rows

    def collect(self) -> Iterator[Metric]:
        what = "Rows of the usage file that were to be written and could not be."
        lost = CounterMetricFamily("anaphora_usage_rows_lost", what, labels=(_TENANT,))
        for tenant, rows in self._lost_rows().items():
            lost.add_metric((tenant,), rows)
        yield lost


class _Own(Collector):
    """The samples of one tenant. Those that name none are not shown: they tell about all."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        self._registry = registry
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            own = [s for s in family.samples if s.labels.get(_TENANT) == self._tenant]
            if own:
                shown = Metric(family.name, family.documentation, family.type, family.unit)
                shown.samples = own
                yield shown
