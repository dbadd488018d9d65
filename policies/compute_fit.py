"""Which compute rates are wrong, and by how much: least squares over measured forwards.

A forward is a sum of kernels, and one forward does not tell which of them was slower than believed.
Forwards of other shapes do: prefill, the LM head, batches that recompute other tails. Of the
explanations that fit all shapes the one with the fewest wrong numbers is taken, and of those the
smallest change. What readers get wrong: where shapes do not tell, that is one factor common to all
rates of the GPU, right near the shapes that were seen and only there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.cost.model import CostModel
from policies.plan.op import Op

COMPUTE = ("gemm", "attention_decode", "attention_window", "attention_prefill", "hbm_bytes_per_s",
           "attention_unfused_decode", "attention_unfused_scores", "layer_norm", "rms_norm",
           "rotary", "launch_s")  # fmt: skip
EXPLAINED = 0.005  # root mean square of relative errors below which a belief is right
LARGEST = 4.0  # factors searched: from a quarter to four times
_RIDGE = 1e-4  # of squared log factors, against squared relative errors: 1 % is 1e-4
_MAX_WRONG = 3  # numbers that may be wrong at once
_GRID, _THIRDS = 15, 8  # factors tried for a number, and cuts by a third between the best ones
_ROUNDS = 3  # of Gauss-Newton

Vector = NDArray[np.float64]
Group = tuple[str, ...]


class Forward(NamedTuple):
    """A forward, its measured seconds, its weight among the forwards of a fit, and the relative
    standard error of the seconds.
    """

    op: Op
    seconds: float
    weight: float
    noise: float = 0.0


class _Kernels(NamedTuple):
    """Kernels of some forwards as arrays: what factors make of them takes no cost model.

    ``limits_s [forwards, kernels, limits]`` are seconds at each rate that may limit a kernel and
    ``rates``, of the same shape, that rate's place in ``COMPUTE``; padding takes no time.
    """

    limits_s: Vector
    rates: NDArray[np.intp]
    launches_s: Vector  # [forwards]

    @classmethod
    def of(cls, belief: CostModel, ops: Sequence[Op]) -> _Kernels:
        """Those of ``ops`` as believed."""
        forwards = [belief.kernels(op) for op in ops]
        most = max(map(len, forwards))
        widest = max(len(limits) for kernels in forwards for limits in kernels)
        limits_s = np.zeros((len(ops), most, widest))
        rates = np.zeros(limits_s.shape, dtype=np.intp)
        for i, kernels in enumerate(forwards):
            for j, limits in enumerate(kernels):
                for k, (name, seconds) in enumerate(limits):
                    limits_s[i, j, k], rates[i, j, k] = seconds, COMPUTE.index(name)
        launches = [belief.n_launches(op) * belief.hardware.launch_s for op in ops]
        return cls(limits_s, rates, np.array(launches))

    def seconds(self, factors: Mapping[str, float]) -> Vector:
        """Seconds of the forwards on a machine whose numbers are multiplied by ``factors``."""
        by_rate = np.array([factors.get(name, 1.0) for name in COMPUTE])
        busy = (self.limits_s / by_rate[self.rates]).max(axis=2).sum(axis=1)
        launches = self.launches_s * factors.get("launch_s", 1.0)
        return np.asarray(np.maximum(busy, launches), dtype=np.float64)


class _Explanation(NamedTuple):
    """Groups of numbers that are wrong by one factor each; its log; squared errors and ridge."""

    cost: float
    groups: list[Group]
    logs: Vector


class ComputeFit:
    """Factors of compute rates of ``belief`` that explain ``forwards``.

    ``tolerance`` is the ``error`` that needs no explanation: ``EXPLAINED``, or two standard errors
    of what was measured where that is more.
    """

    def __init__(self, belief: CostModel, forwards: Sequence[Forward]) -> None:
        self._kernels = _Kernels.of(belief, [forward.op for forward in forwards])
        self._log_s = np.log([forward.seconds for forward in forwards])
        weights = np.array([forward.weight for forward in forwards])
        self._root = np.sqrt(weights / weights.sum())
        noise = self._root * np.array([forward.noise for forward in forwards])
        self.tolerance = max(EXPLAINED, 2.0 * float(np.linalg.norm(noise)))
        hardware = belief.hardware
        rates = tuple(n for n in COMPUTE if n != "launch_s" and getattr(hardware, n) is not None)
        # The common factor first: of explanations that are equally good the first is taken.
        self._groups = [rates, *((name,) for name in COMPUTE if self._matters(name))]

    def error(self, factors: Mapping[str, float]) -> float:
        """Weighted root mean square of the log of measured over predicted seconds."""
        return float(np.linalg.norm(self._residuals(factors)))

    def _matters(self, name: str) -> bool:
        """Whether any forward would take longer if the number, a rate or a cost, were worse."""
        worse = {name: LARGEST if name == "launch_s" else 1 / LARGEST}
        return not np.allclose(self._residuals(worse), self._residuals({}), atol=1e-9)

    def solve(self) -> dict[str, float]:
        """The factors, of ``COMPUTE``; numbers that need not be wrong are left out."""
        known = _Explanation(self._cost([], np.zeros(0)), [], np.zeros(0))
        while len(known.groups) < _MAX_WRONG:
            if self.error(self._factors(known.groups, known.logs)) <= self.tolerance:
                break
            wider = self._best(known)
            if wider is None or wider.cost > 0.75 * known.cost:
                break
            known = wider
            # What was taken for lack of better may be replaced now that more is known.
            for i in range(len(known.groups) - 1):
                rest = _Explanation(0.0, _without(known.groups, i), np.delete(known.logs, i))
                other = self._best(rest)
                if other is not None and other.cost < 0.99 * known.cost:
                    known = other
                    break
        return self._factors(known.groups, known.logs)

    def _best(self, known: _Explanation) -> _Explanation | None:
        """The best explanation with one number more."""
        options = [group for group in self._groups if group not in known.groups]
        tried = [self._extended(known, group) for group in options]
        least = min((option.cost for option in tried), default=0.0)
        # Within a hair of the best the first is taken, else noise would choose.
        return next((option for option in tried if option.cost <= least + 1e-9), None)

    # ---- one explanation ------------------------------------------------------------------

    def _extended(self, known: _Explanation, group: Group) -> _Explanation:
        """The explanation with the numbers of ``group`` as well.

        A number that limits no kernel at first, like a launch cost, shows no gradient: the new
        factor is looked for over the whole range, then all are polished.
        """
        groups = [*known.groups, group]
        top = math.log(LARGEST)

        def cost(log_factor: float) -> float:
            return self._cost(groups, np.append(known.logs, log_factor))

        grid = np.linspace(-top, top, _GRID)
        at = int(np.argmin([cost(x) for x in grid]))
        low, high = grid[max(at - 1, 0)], grid[min(at + 1, _GRID - 1)]
        for _ in range(_THIRDS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if cost(left) <= cost(right):
                high = right
            else:
                low = left
        return self._polished(groups, np.append(known.logs, (low + high) / 2))

    def _polished(self, groups: list[Group], logs: Vector) -> _Explanation:
        """Gauss-Newton on all log factors, as long as it gets better."""
        best, ridge = self._cost(groups, logs), math.sqrt(_RIDGE)
        for _ in range(_ROUNDS):
            residuals = self._residuals(self._factors(groups, logs))
            columns = []
            for i in range(len(groups)):
                moved = logs.copy()
                moved[i] += 1e-4
                columns.append((self._residuals(self._factors(groups, moved)) - residuals) / 1e-4)
            rows = np.vstack([np.column_stack(columns), ridge * np.eye(len(groups))])
            target = -np.concatenate([residuals, ridge * logs])
            step = np.linalg.lstsq(rows, target, rcond=None)[0]
            moved = np.clip(logs + step, -math.log(LARGEST), math.log(LARGEST))
            cost = self._cost(groups, moved)
            if cost >= best:
                break
            best, logs = cost, moved
        return _Explanation(best, groups, logs)

    def _cost(self, groups: list[Group], logs: Vector) -> float:
        residuals = self._residuals(self._factors(groups, logs))
        return float(residuals @ residuals + _RIDGE * (logs @ logs))

    def _residuals(self, factors: Mapping[str, float]) -> Vector:
        predicted = np.log(self._kernels.seconds(factors))
        return np.asarray(self._root * (self._log_s - predicted), dtype=np.float64)

    @staticmethod
    def _factors(groups: list[Group], logs: Vector) -> dict[str, float]:
        factors: dict[str, float] = {}
        for group, log_factor in zip(groups, logs, strict=True):
            for name in group:
                factors[name] = factors.get(name, 1.0) * math.exp(float(log_factor))
        return factors


def _without(groups: list[Group], i: int) -> list[Group]:
    return [*groups[:i], *groups[i + 1 :]]
