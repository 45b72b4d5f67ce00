"""Prometheus metrics of one gateway, in a registry of their own."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from kvrelay.events import Event, RequestTimeline
from kvrelay.gateway.cluster import Cluster

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PHASE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PHASES = {
    "prefill": (Event.PREFILL_BEGIN, Event.PREFILL_END),
    "transfer": (Event.TRANSFER_BEGIN, Event.TRANSFER_END),
    "hand_over": (Event.PREFILL_END, Event.TRANSFER_END),
}
_PAIR_COUNTS = {
    "num_handovers": ("kvrelay_transfers", "Hand-overs of KV that were acknowledged."),
    "num_bytes": ("kvrelay_transfer_bytes", "Bytes of KV that were sent."),
    "transfer_s": ("kvrelay_transfer_seconds", "First piece to acknowledgement, summed."),
    "num_grants": ("kvrelay_grants", "Offers of KV that were granted."),
    "grant_wait_s": ("kvrelay_grant_wait_seconds", "Offer to grant, summed."),
    "num_refusals": ("kvrelay_refusals", "Offers of KV that were refused."),
    "num_repairs": ("kvrelay_transfer_repairs", "Pieces of KV that were asked for once more."),
    "num_damaged": ("kvrelay_digest_failures", "Pieces of KV whose digest was wrong."),
}
_BLOCK_STATES = ("free", "cached", "leased", "revoked")
_LOADS = ("num_waiting", "num_running", "num_held", "num_offers", "num_waiting_tokens")


class Metrics:
    """Counters and histograms of requests. All times are in seconds."""

    def __init__(self) -> None:
        """All zero."""
        self.registry = CollectorRegistry()
        self.requests = Counter("kvrelay_requests", "Requests by how they ended.", ["outcome"], registry=self.registry)
        self.in_flight = Gauge("kvrelay_requests_in_flight", "Requests being served.", registry=self.registry)
        self.ttft = Histogram(
            "kvrelay_ttft_seconds", "Arrival to first token.", buckets=_TTFT_BUCKETS_S, registry=self.registry
        )
        self.itl = Histogram(
            "kvrelay_itl_seconds", "Gaps between tokens.", buckets=_ITL_BUCKETS_S, registry=self.registry
        )
        self.e2e = Histogram(
            "kvrelay_e2e_seconds", "Arrival to last token.", buckets=_E2E_BUCKETS_S, registry=self.registry
        )
        self.phases = Histogram(
            "kvrelay_phase_seconds",
            "Prefill, transfer of KV, and hand_over: what of the transfer was not hidden behind the prefill.",
            ["phase"],
            buckets=_PHASE_BUCKETS_S,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "kvrelay_prompt_tokens", "Tokens of prompts sent to workers.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "kvrelay_cached_tokens",
            "Tokens of prompts that workers found in a cache and did not compute.",
            registry=self.registry,
        )
        self.generated_tokens = Counter(
            "kvrelay_generated_tokens", "Tokens that came from workers.", registry=self.registry
        )
        self.ignored_fields = Counter(
            "kvrelay_ignored_fields", "Fields of requests that nobody knows.", registry=self.registry
        )

    def on_token(self, timeline: RequestTimeline, now: float) -> None:
        """A token of a request came."""
        self.generated_tokens.inc()
        gap = timeline.token(now)
        if gap is not None:
            self.itl.observe(gap)
        elif timeline.ttft_s is not None:
            self.ttft.observe(timeline.ttft_s)

    def on_end(self, timeline: RequestTimeline) -> None:
        """A request ended; only complete answers have a latency worth comparing."""
        if timeline.ended is Event.FINISHED and timeline.e2e_s is not None:
            self.e2e.observe(timeline.e2e_s)
            for phase, events in _PHASES.items():
                if (seconds := timeline.between(*events)) is not None:
                    self.phases.labels(phase).observe(max(0.0, seconds))

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class ClusterCollector(Collector):
    """What workers said in their newest heartbeats."""

    def __init__(self, cluster: Cluster, events: Callable[[], Mapping[str, int]]) -> None:
        """`events` gives the gateway's own counters of what was odd."""
        self._cluster = cluster
        self._events = events

    def collect(self) -> Iterator[Metric]:
        """Reads everything anew."""
        blocks = GaugeMetricFamily("kvrelay_kv_blocks", "KV blocks by state.", labels=["worker", "role", "state"])
        loads = GaugeMetricFamily("kvrelay_worker_load", "What workers have to do.", labels=["worker", "role", "what"])
        events = CounterMetricFamily(
            "kvrelay_worker_events", "What workers counted.", labels=["worker", "role", "event"]
        )
        for worker, label in self._cluster.labels():
            if (status := worker.status) is None:
                continue
            for state in _BLOCK_STATES:
                blocks.add_metric([label, worker.role, state], getattr(status.ledger, state))
            for what in _LOADS:
                loads.add_metric([label, worker.role, what], getattr(status.load, what))
            for event, count in status.counters.items():
                events.add_metric([label, worker.role, event], count)
        yield from self._pairs()
        own = CounterMetricFamily("kvrelay_gateway_events", "What the gateway counted.", labels=["event"])
        for event, count in self._events().items():
            own.add_metric([event], count)
        workers = GaugeMetricFamily("kvrelay_workers", "Workers that registered.", labels=["role", "usable"])
        for (role, usable), number in self._cluster.census().items():
            workers.add_metric([role, str(usable).lower()], number)
        yield from (blocks, loads, events, own, workers)

    def _pairs(self) -> Iterator[Metric]:
        named = {worker.incarnation: label for worker, label in self._cluster.labels()}
        for count, (name, text) in _PAIR_COUNTS.items():
            family = CounterMetricFamily(name, text, labels=["sender", "receiver", "transport"])
            for worker, label in self._cluster.labels():
                for pair in worker.status.pairs if worker.status else ():
                    receiver = named.get(pair.receiver, f"{pair.receiver:016x}")
                    family.add_metric([label, receiver, pair.transport], getattr(pair, count))
            yield family
