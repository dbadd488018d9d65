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
    fields = key.split("/")
    if len(fields) != 6 or any(f[:1] != c for f, c in zip(fields[1:], "gslbp", strict=False)):
        raise ValueError(f"key: {key!r} is not of the form kind/g0/s0/l0/b0/p0")
    numbers = [int(field[1:]) for field in fields[1:]]
    return KeyParts(fields[0], *numbers)
