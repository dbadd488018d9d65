"""Routing: which machine of a fleet serves a request.

The kappa paper routes by the ratio alone: above 100 to the machine with the fast link, below 1 to
the one with cheap compute. ``ShortestFinish`` asks each machine when it would be done. What readers
get wrong: a threshold ignores queues, so it overloads the machine that suits most requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.spec.request import Request


@dataclass(frozen=True, slots=True)
class MachineView:
    """One machine as a router sees it.

    ``request`` is the arrival as it would be there (what its store holds counts), ``wait_s`` the
    predicted time until it starts and ``run_s`` the time it then needs to its first token.
    """

    name: str
    request: Request
    kappa_crit: float
    link_bytes_per_s: float
    compute_flops_per_s: float
    wait_s: float
    run_s: float


class Routing(Protocol):
    """Picks a machine for an arrival."""

    @property
    def name(self) -> str:
        """Name in results."""
        ...

    def pick(self, machines: Sequence[MachineView]) -> int:
        """Position of the machine that serves the request."""
        ...


@dataclass(frozen=True, slots=True)
class ShortestFinish:
    """The machine whose first token is predicted earliest; ties go to the first."""

    name: str = "shortest-finish"

    def pick(self, machines: Sequence[MachineView]) -> int:
        """Least ``wait_s + run_s``."""
        return min(range(len(machines)), key=lambda i: machines[i].wait_s + machines[i].run_s)


@dataclass(frozen=True, slots=True)
class LeastWaiting:
    """The machine with the shortest predicted wait, whatever it is good at."""

    name: str = "least-waiting"

    def pick(self, machines: Sequence[MachineView]) -> int:
        """Least ``wait_s``."""
        return min(range(len(machines)), key=lambda i: machines[i].wait_s)


@dataclass(frozen=True, slots=True)
class KappaThresholds:
    """The paper's rule (papers.md 1.2): ``K / T > high`` to the fastest links, ``< low`` to others.

    The fastest links are those of the machines with the highest kappa_crit; requests in
    between go anywhere. Among the machines that qualify the one with the shortest wait is taken.
    """

    high: float = 100.0
    low: float = 1.0
    name: str = "kappa-thresholds"

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high:
            raise ValueError(f"routing.low: {self.low} must be in [0, high = {self.high}]")

    def pick(self, machines: Sequence[MachineView]) -> int:
        """Shortest wait among the machines that the ratio allows."""
        most = max(machine.kappa_crit for machine in machines)
        best = range(len(machines))

        def allowed(i: int) -> bool:
            ratio, fast = machines[i].request.kappa_ratio, machines[i].kappa_crit == most
            return (fast or ratio <= self.high) and (not fast or ratio >= self.low)

        able = [i for i in best if allowed(i)] or list(best)
        return min(able, key=lambda i: machines[i].wait_s)
