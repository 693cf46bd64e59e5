"""Exchanges, counted by purpose and by link class, and, where asked for, each with its begin and end."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LINKS = ("same_numa", "same_node", "other_node", "payload")


@dataclass(frozen=True)
class Exchange:
    """One exchange as one rank saw it: ``bytes`` that it sent by link class, begin and end in seconds since 1970."""

    operation: str
    purpose: str
    begin: float
    end: float
    bytes: dict[str, int]


@dataclass
class Trace:
    """Counters of one rank.

    link_of[r] says how rank r is reached: "self" (never counted), "same_numa", "same_node" or "other_node".
    bytes[purpose][link]: sent by this rank. calls[purpose], seconds[purpose]: exchanges, and their wall time, waiting for
    late ranks included. records: every exchange, where a list is given; it grows until somebody empties it.
    """

    link_of: list[str]
    records: list[Exchange] | None = None
    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    calls: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def exchange(self, operation: str, purpose: str) -> Iterator[Callable[[int, int], None]]:
        """The block is one exchange; it calls what it is given with (peer rank, bytes) for everything it sends."""
        opened = self.begin(operation, purpose)
        try:
            yield opened.sent
        finally:
            opened.end()

    def begin(self, operation: str, purpose: str) -> "OpenExchange":
        """As ``exchange``, for one whose end is elsewhere in the program."""
        return OpenExchange(self, operation, purpose, time.time(), time.perf_counter())

    def ahead(self) -> "Trace":
        """A trace for what is done ahead of its time; ``take`` counts it when its time has come."""
        return Trace(self.link_of, None if self.records is None else [])

    def take(self, other: "Trace") -> None:
        """Add what another trace counted."""
        for purpose, links in other.bytes.items():
            for link, count in links.items():
                self.bytes[purpose][link] += count
        self.calls.update(other.calls)
        for purpose, seconds in other.seconds.items():
            self.seconds[purpose] += seconds
        if self.records is not None:
            self.records += other.records or []

    def clear(self) -> None:
        """Forget what was counted."""
        self.bytes.clear()
        self.calls.clear()
        self.seconds.clear()
        if self.records is not None:
            self.records.clear()


@dataclass
class OpenExchange:
    """An exchange that has not ended. started: as perf_counter counts."""

    trace: Trace
    operation: str
    purpose: str
    at: float
    started: float
    bytes: Counter[str] = field(default_factory=Counter)

    def sent(self, peer: int, nbytes: int) -> None:
        """Count ``nbytes`` sent to rank ``peer``."""
        link = self.trace.link_of[peer]
        if link != "self":
            self.bytes[link] += nbytes

    def end(self) -> None:
        """It has ended: it counts now."""
        trace, seconds = self.trace, time.perf_counter() - self.started
        trace.calls[self.purpose] += 1
        trace.seconds[self.purpose] += seconds
        for link, count in self.bytes.items():
            trace.bytes[self.purpose][link] += count
        if trace.records is not None:
            trace.records.append(Exchange(self.operation, self.purpose, self.at, self.at + seconds, dict(self.bytes)))


def link_classes(nodes: Sequence[Any], rank: int, domains: Sequence[int | None] | None = None) -> list[str]:
    """Link class of every rank as seen from ``rank``. nodes: what stands for the node of each rank, such as its host.
    domains: the NUMA domain of each; None for one that may run on several, or is not known."""
    out = []
    for r, node in enumerate(nodes):
        near = domains is not None and domains[r] is not None and domains[r] == domains[rank]
        out.append("self" if r == rank else "other_node" if node != nodes[rank] else "same_numa" if near else "same_node")
    return out


def total(traces: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Sum of what was sent over ranks; payload is the same on all ranks and is taken once (the largest)."""
    out: dict[str, dict[str, int]] = {}
    for trace in traces:
        for purpose, links in trace.items():
            into = out.setdefault(purpose, {})
            for link, count in links.items():
                into[link] = max(into.get(link, 0), count) if link == "payload" else into.get(link, 0) + count
    return out
