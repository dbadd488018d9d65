"""Closed loop: a belief is re-fitted from the spans of steps that have ended.

Each link has one factor, the weighted median of what its copies reached over what was believed;
what compute took is explained by ``policies.compute_fit``. What readers get wrong: nothing can be
learnt of what never ran. A policy that believes recompute to be hopeless does not recompute, and so
never sees how fast attention over a recomputed tail would have been.

Decisions settle. A belief that explains what was seen is kept; a new one is adopted only where a
factor moves by more than its margin, and a factor that turns back doubles its margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from policies.compute_fit import COMPUTE, ComputeFit, Forward
from policies.cost.model import CostModel
from policies.plan.op import Kind, Lane, Op, Tier
from policies.spec.factors import with_factors
from policies.trace.span import Span

Finished = tuple[Op, Span]
Shape = tuple[object, ...]

WINDOW_STEPS = 8
MARGIN = 0.02  # of the log of a factor: smaller changes are not adopted
_SETTLED = 0.01  # error of a belief that is not fitted again: clocks differ by so much
_WORSE = 1.25  # times the error that a fit left, before compute is fitted to the same shapes again
_LEAST_WEIGHT = 0.02  # of a shape among the forwards of its step: the LM head is short but telling

_TO_GPU = frozenset({Kind.LOAD_WEIGHT, Kind.LOAD_KV, Kind.LOAD_ACT})
_RATE_OF = {
    Kind.READ_WEIGHT: "disk_read",
    Kind.READ_KV: "disk_read",
    Kind.READ_ACT: "disk_read",
    Kind.WRITE_KV: "disk_write",
    Kind.WRITE_ACT: "disk_write",
    Kind.HOST_COPY: "host_copy",
    Kind.CPU_ATTEND: "cpu_attention_bytes_per_s",
}


@dataclass(slots=True)
class _Step:
    """What one step showed: ratios of rates and their weights, seconds of forwards by shape."""

    ratios: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    forwards: dict[Shape, tuple[Op, list[float]]] = field(default_factory=dict)


class Refit:
    """A belief that follows what is measured; ``belief`` is the one that it starts from.

    ``factors`` multiply numbers of the first belief's profile, those that are left out are as
    believed. A duplex factor is believed as it is: what both directions of the link lost to each
    other is taken out of their copies' times by it. A link's latency is believed, too.
    """

    def __init__(self, belief: CostModel) -> None:
        self.belief = belief
        self.factors: dict[str, float] = {}
        self._first = belief
        self._window: dict[tuple[int, int], _Step] = {}
        self._margins: dict[str, float] = {}
        self._rises: dict[str, bool] = {}  # direction of a factor's last adopted change
        self._fitted: frozenset[Shape] = frozenset()  # shapes that compute was last fitted to
        self._left: float | None = None  # error that this fit left

    def add(self, finished: Iterable[Finished]) -> CostModel:
        """The belief after more ops have ended, each given once; the same object if it is kept."""
        pairs = list(finished)
        if pairs:
            self._see(pairs)
            self._adopt(self._found())
        return self.belief

    # ---- what was measured ----------------------------------------------------------------

    def _see(self, pairs: Sequence[Finished]) -> None:
        shared_s = _shared_seconds(pairs)
        for op, span in pairs:
            if op.kind is Kind.FENCE:
                continue
            step = self._window.setdefault((op.block, op.step), _Step())
            seconds = span.end_s - span.start_s
            if op.kind is Kind.FORWARD:
                if seconds > 0:
                    step.forwards.setdefault(self._shape(op), (op, []))[1].append(seconds)
                continue
            name, latency_s = self._rate(op)
            alone_s = seconds - (1.0 - self._first.hardware.duplex) * shared_s.get(span.key, 0.0)
            measured_s = alone_s - latency_s
            believed_s = self._first.seconds(op) - latency_s
            if measured_s > 0 and believed_s > 0:
                step.ratios.setdefault(name, []).append((believed_s / measured_s, believed_s))
        while len(self._window) > WINDOW_STEPS:
            del self._window[next(iter(self._window))]

    def _rate(self, op: Op) -> tuple[str, float]:
        """Name of the number that a transfer's seconds follow from, and its latency."""
        name = _RATE_OF.get(op.kind)
        if name is None:
            pageable = any(
                slot.tier is Tier.HOST and not slot.pinned for slot in (*op.reads, *op.writes)
            )
            name = ("h2d" if op.kind in _TO_GPU else "d2h") + ("_pageable" if pageable else "")
        if op.kind is Kind.CPU_ATTEND:
            return name, 0.0
        return name, self._first.link(op).latency_s

    def _shape(self, op: Op) -> Shape:
        """Forwards of one step that cost the same; from step to step only the context grows."""
        model = self._first.model
        experts = op.layer < model.n_layers and model.is_moe(op.layer)
        return (experts, op.scope, op.attention, op.n_seqs, op.n_new, op.n_recompute, op.n_front,
                op.n_project)  # fmt: skip

    # ---- what follows from it -------------------------------------------------------------

    def _found(self) -> dict[str, float]:
        """Factors that the window shows; a factor of which it shows nothing stays."""
        found = dict(self.factors)
        steps: dict[str, list[float]] = {}
        for step in self._window.values():
            for name, ratios in step.ratios.items():
                steps.setdefault(name, []).append(_weighted_median(ratios))
        found.update((name, float(np.median(medians))) for name, medians in steps.items())
        forwards = self._forwards()
        if forwards:
            fit = ComputeFit(self._first, tuple(forwards.values()))
            compute = {n: f for n, f in self.factors.items() if n in COMPUTE}
            error = fit.error(compute)
            if error > max(fit.tolerance, _SETTLED) and self._unfitted(error, forwards.keys()):
                found = {n: f for n, f in found.items() if n not in COMPUTE} | fit.solve()
        return found

    def _unfitted(self, error: float, shapes: Set[Shape]) -> bool:
        """Whether there are new shapes, or an error worse than the one that the last fit left."""
        if shapes <= self._fitted:
            if self._left is None:
                self._left = error
            if error <= _WORSE * self._left:
                return False
        self._fitted, self._left = frozenset(shapes), None
        return True

    def _forwards(self) -> dict[Shape, Forward]:
        """A forward of every shape: the newest, with the median share of what was believed."""
        shares: dict[Shape, list[float]] = {}
        newest: dict[Shape, tuple[Op, float]] = {}
        for step in self._window.values():
            total_s = sum(sum(seconds) for _, seconds in step.forwards.values())
            for shape, (op, seconds) in step.forwards.items():
                believed_s = self._first.seconds(op)
                shares.setdefault(shape, []).extend(s / believed_s for s in seconds)
                newest[shape] = op, max(_LEAST_WEIGHT, sum(seconds) / total_s)
        forwards = {}
        for shape, (op, weight) in newest.items():
            share, noise = _median(shares[shape])
            forwards[shape] = Forward(op, share * self._first.seconds(op), weight, noise)
        return forwards

    def _adopt(self, found: dict[str, float]) -> None:
        """Take what moved by more than its margin; compute rates, fitted together, all or none."""
        names = sorted(self.factors.keys() | found.keys())
        moves = {n: math.log(found.get(n, 1.0) / self.factors.get(n, 1.0)) for n in names}
        far = {n for n, move in moves.items() if abs(move) > self._margins.get(n, MARGIN)}
        if any(name in COMPUTE for name in far):
            far |= {name for name in names if name in COMPUTE}
        if not far:
            return
        for name in far:
            self.factors[name] = found.get(name, 1.0)
            if moves[name]:
                rises = moves[name] > 0
                if self._rises.get(name, rises) is not rises:
                    self._margins[name] = 2 * self._margins.get(name, MARGIN)
                self._rises[name] = rises
        first = self._first
        hardware = with_factors(first.hardware, self.factors)
        self.belief = CostModel(first.model, hardware, first.placement)


def _median(values: Sequence[float]) -> tuple[float, float]:
    """The median and its relative standard error, of a normal scatter: 1.4826 and 1.2533 make the
    median deviation a standard one and its error that of a median.
    """
    middle = float(np.median(values))
    deviation = float(np.median(np.abs(np.array(values) - middle)))
    return middle, 1.4826 * 1.2533 * deviation / middle / math.sqrt(len(values))


def _weighted_median(samples: Sequence[tuple[float, float]]) -> float:
    """The value that half of the weight lies at or below."""
    values = np.array(samples)
    values = values[np.argsort(values[:, 0])]
    weight = np.cumsum(values[:, 1])
    return float(values[np.searchsorted(weight, weight[-1] / 2), 0])


def _shared_seconds(pairs: Sequence[Finished]) -> dict[str, float]:
    """Seconds of each copy in which the link carried one of the other direction as well.

    A copy that is given only later is not seen: of few copies at the edge of a step.
    """
    lanes: dict[Lane, list[Span]] = {Lane.H2D: [], Lane.D2H: []}
    for _, span in pairs:
        if span.lane in lanes:
            lanes[span.lane].append(span)
    down, up = (sorted(spans, key=lambda span: span.start_s) for spans in lanes.values())
    shared: dict[str, float] = {}
    i = j = 0
    while i < len(down) and j < len(up):
        both_s = min(down[i].end_s, up[j].end_s) - max(down[i].start_s, up[j].start_s)
        if both_s > 0:
            for span in (down[i], up[j]):
                shared[span.key] = shared.get(span.key, 0.0) + both_s
        if down[i].end_s <= up[j].end_s:
            i += 1
        else:
            j += 1
    return shared
