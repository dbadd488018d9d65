"""Measured rates as piecewise-linear curves with a stated domain.

Beyond the last point the last rate holds and ``extrapolated`` says so; below the first point the
curve continues its first segment through the origin, because a rate that is bound by reading a
fixed operand is proportional to the work. Interpolation is linear in x and y: log-space
interpolation of latency grids is biased by more than ten per cent.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


def _check_axis(name: str, values: tuple[float, ...]) -> None:
    if not values:
        raise ValueError(f"{name}: is empty, needs at least one point")
    if any(v <= 0 for v in values):
        raise ValueError(f"{name}: {values} has a value <= 0, all must be positive")


def _check_increasing(name: str, values: tuple[float, ...]) -> None:
    _check_axis(name, values)
    if any(b <= a for a, b in pairwise(values)):
        raise ValueError(f"{name}: {values} must be strictly increasing")


@dataclass(frozen=True, slots=True)
class Curve:
    """A positive rate ``y`` over a positive amount ``x``, points in increasing x."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_increasing("Curve.x", self.x)
        _check_axis("Curve.y", self.y)
        if len(self.x) != len(self.y):
            raise ValueError(f"Curve: {len(self.x)} x values and {len(self.y)} y values")

    def __call__(self, x: float) -> float:
        """Rate at ``x > 0``."""
        if x <= 0:
            raise ValueError(f"Curve: x is {x}, must be positive")
        if x >= self.x[-1]:
            return self.y[-1]
        if x <= self.x[0]:
            return self.y[0] * x / self.x[0]
        i = bisect_right(self.x, x) - 1
        share = (x - self.x[i]) / (self.x[i + 1] - self.x[i])
        return self.y[i] + share * (self.y[i + 1] - self.y[i])

    def extrapolated(self, x: float) -> bool:
        """Whether ``x`` lies beyond the last measured point."""
        return x > self.x[-1]


@dataclass(frozen=True, slots=True)
class Grid:
    """A positive rate over two amounts: ``z[i][j]`` at ``x[i], y[j]``; bilinear, edges hold."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    z: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_increasing("Grid.x", self.x)
        _check_increasing("Grid.y", self.y)
        if len(self.z) != len(self.x) or any(len(row) != len(self.y) for row in self.z):
            raise ValueError(f"Grid.z: must have {len(self.x)} rows of {len(self.y)} values")
        for row in self.z:
            _check_axis("Grid.z", row)

    def __call__(self, x: float, y: float) -> float:
        """Rate at ``(x, y)``.

        Outside the grid the nearest edge holds; below the first x it falls in proportion to x.
        """
        if x <= 0 or y <= 0:
            raise ValueError(f"Grid: ({x}, {y}) must both be positive")
        below = min(1.0, x / self.x[0])
        i, share_x = _locate(self.x, x)
        j, share_y = _locate(self.y, y)
        i1, j1 = min(i + 1, len(self.x) - 1), min(j + 1, len(self.y) - 1)
        low = self.z[i][j] + share_y * (self.z[i][j1] - self.z[i][j])
        high = self.z[i1][j] + share_y * (self.z[i1][j1] - self.z[i1][j])
        return below * (low + share_x * (high - low))

    def extrapolated(self, x: float, y: float) -> bool:
        """Whether either coordinate lies beyond its last measured point."""
        return x > self.x[-1] or y > self.y[-1]


def _locate(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """Index of the segment that holds ``value`` and the position in it, clamped to the axis."""
    if value <= axis[0] or len(axis) == 1:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 1, 0.0
    i = bisect_right(axis, value) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])
