"""What an executor needs to know of an op: seconds, bytes and FLOPs.

A policy's belief and the plant that the simulator charges both have this shape. Seconds are
*uncontended*: what the op takes when nothing else runs. Contention is the executor's business.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from policies.plan.op import Op


class Costs(Protocol):
    """Cost of one op on some machine; the same op always has the same bytes and FLOPs."""

    def seconds(self, op: Op) -> float:
        """Uncontended duration, finite and >= 0."""
        ...

    def nbytes(self, op: Op) -> int:
        """Bytes that the op moves over its lane's link; 0 if it moves none."""
        ...

    def flops(self, op: Op) -> float:
        """Floating-point operations, a multiply-add counted as two; 0 if it computes nothing."""
        ...


def checked_seconds(costs: Costs, op: Op) -> float:
    """Seconds of an op; ``ValueError`` if they are not finite and >= 0."""
    seconds = float(costs.seconds(op))
    if not 0.0 <= seconds < inf:
        raise ValueError(f"seconds: {seconds} for op {op.key}, must be finite and >= 0")
    return seconds
