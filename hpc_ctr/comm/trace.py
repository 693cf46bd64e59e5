"""Bytes that travel, counted by purpose and by link class."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LINKS = ("same_numa", "same_node", "other_node", "payload")


@dataclass
class Trace:
    """Counters of one rank.

    link_of[r] says how rank r is reached: "self" (never counted), "same_numa", "same_node" or "other_node".
    Collectives of a library, whose inner messages are the library's affair, count the bytes handed in as "payload".
    """

    link_of: list[str]
    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def sent(self, purpose: str, peer: int, nbytes: int) -> None:
        """Count a message of ``nbytes`` to rank ``peer``."""
        link = self.link_of[peer]
        if link != "self":
            self.bytes[purpose][link] += nbytes

    def payload(self, purpose: str, nbytes: int) -> None:
        """Count ``nbytes`` handed to a library's collective."""
        self.bytes[purpose]["payload"] += nbytes

    def ahead(self) -> "Trace":
        """A trace for what is done ahead of its time; ``take`` counts it when its time has come."""
        return Trace(self.link_of)

    def take(self, other: "Trace") -> None:
        """Add what another trace counted."""
        for purpose, links in other.bytes.items():
            for link, count in links.items():
                self.bytes[purpose][link] += count
        for purpose, seconds in other.seconds.items():
            self.seconds[purpose] += seconds

    def clear(self) -> None:
        """Forget what was counted."""
        self.bytes.clear()
        self.seconds.clear()

    @contextmanager
    def timed(self, purpose: str) -> Iterator[None]:
        """Add the block's wall time to ``purpose``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += time.perf_counter() - begin


def link_classes(nodes: Sequence[Any], rank: int, domains: Sequence[int | None] | None = None) -> list[str]:
    """Link class of every rank as seen from ``rank``. nodes: what stands for the node of each rank, such as its host.
    domains: the NUMA domain of each; None for one that may run on several, or is not known."""
    out = []
    for r, node in enumerate(nodes):
        near = domains is not None and domains[r] is not None and domains[r] == domains[rank]
        out.append("self" if r == rank else "other_node" if node != nodes[rank] else "same_numa" if near else "same_node")
    return out


def total(traces: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Sum of point-to-point bytes over ranks; payload is the same on all ranks and is taken once (the largest)."""
    out: dict[str, dict[str, int]] = {}
    for trace in traces:
        for purpose, links in trace.items():
            into = out.setdefault(purpose, {})
            for link, count in links.items():
                into[link] = max(into.get(link, 0), count) if link == "payload" else into.get(link, 0) + count
    return out
