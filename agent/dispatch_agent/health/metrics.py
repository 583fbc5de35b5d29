"""Counts and states of a watch for Prometheus. Read when they are asked for: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dispatch_agent.health.server import Page

PREFIX = "dispatch_publish_"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a watch has counted, and what it is at, as of one moment. Sizes are in bytes, ages in seconds.

    `last_commit` is in seconds since 1970, None as long as this watch has published nothing.
    """

    passes: int
    failed_passes: int
    published: int
    already: int
    incomplete: int
    unpublished: int
    oldest_unpublished: float
    uploaded: int
    upload_done: int
    upload_size: int
    claimed: bool
    fenced: bool
    ready: bool
    live: bool
    last_commit: float | None


def exposition(look: Callable[[], Figures], identity: dict[str, str]) -> Callable[[str], Page]:
    """What answers a scrape, in the format that its Accept header asks for. `identity`: labels that never change."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Watch(look, identity))

    def page(accept: str) -> Page:
        encode, kind = choose_encoder(accept)
        return Page(encode(registry), kind)

    return page


class _Watch(Collector):
    def __init__(self, look: Callable[[], Figures], identity: dict[str, str]) -> None:
        self._look = look
        self._identity = identity

    def collect(self) -> Iterator[Metric]:
        now = self._look()
        yield InfoMetricFamily(
            PREFIX.rstrip("_"), "The execution that is published, and by which version.", self._identity
        )
        yield _counter("passes", "Looks at the folder that did not fail as a whole.", now.passes)
        yield _counter("failed_passes", "Looks that failed as a whole, as where the store is away.", now.failed_passes)
        yield _counter("published", "Saves that this watch committed.", now.published)
        yield _counter("already", "Saves whose content was published before.", now.already)
        yield _counter("uploaded_bytes", "Bytes of saves read to be sent, failed tries included.", now.uploaded)
        yield _gauge("incomplete", "Saves that are not finished by the completion rule.", now.incomplete)
        yield _gauge("unpublished", "Complete saves that are not committed yet.", now.unpublished)
        yield _gauge("oldest_unpublished_seconds", "How long the oldest of those is known.", now.oldest_unpublished)
        yield _gauge("upload_done_bytes", "Of the save on its way, what was read to be sent.", now.upload_done)
        yield _gauge("upload_size_bytes", "The size of the save on its way, 0 if there is none.", now.upload_size)
        yield _gauge("claimed", "Whether this watch holds its folder's place in the store.", now.claimed)
        yield _gauge("fenced", "Whether a newer execution has published, so that this one may not.", now.fenced)
        yield _gauge("ready", "What /readyz says.", now.ready)
        yield _gauge("live", "What /livez says.", now.live)
        if now.last_commit is not None:
            yield _gauge("last_commit_timestamp_seconds", "When this watch last committed a save.", now.last_commit)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=float(value))
