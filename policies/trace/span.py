"""Spans and traces: what an executor, simulated or real, reports of the ops that it ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from policies.plan.op import Kind, Lane


class Span(NamedTuple):
    """One op as executed. Times in seconds since the start of the run."""

    key: str
    kind: Kind
    lane: Lane
    start_s: float
    end_s: float
    nbytes: int
    flops: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans in program order (the order in which the policy emitted the ops)."""

    spans: tuple[Span, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last span; 0 for an empty trace."""
        return max((span.end_s for span in self.spans), default=0.0)


class KeyParts(NamedTuple):
    """The numbers in an op key (see ``Op.key``)."""

    kind: str
    block: int
    step: int
    layer: int
    batch: int
    part: int


def parse_key(key: str) -> KeyParts:
    """Numbers of an op key; ``ValueError`` if it has another form."""
    try:
        kind, g, s, layer, batch, part = key.split("/")
        if g[0] + s[0] + layer[0] + batch[0] + part[0] == "gslbp":
            return KeyParts(
                kind, int(g[1:]), int(s[1:]), int(layer[1:]), int(batch[1:]), int(part[1:])
            )
    except (ValueError, IndexError):
        pass
    raise ValueError(f"key: {key!r} is not of the form kind/g0/s0/l0/b0/p0")
