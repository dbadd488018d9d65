"""A machine whose numbers are multiples of another one's.

What readers get wrong: a factor multiplies the number that a profile states. That is a rate for
links and curves, so a factor of 2 halves times, but a duration for ``launch_s`` and ``sync_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link


def with_factors(hardware: HardwareProfile, factors: Mapping[str, float]) -> HardwareProfile:
    """``hardware`` with numbers multiplied; a link keeps its latency, a curve its shape.

    A curve that the profile lacks stays lacking. ``ValueError`` for a factor that is not positive.
    """
    changed: dict[str, Any] = {}
    for name, factor in factors.items():
        if not factor > 0:
            raise ValueError(f"factors.{name}: {factor} must be positive")
        value = getattr(hardware, name)
        if value is None or factor == 1.0:
            continue
        if isinstance(value, Link):
            changed[name] = Link(value.latency_s, value.bytes_per_s * factor)
        elif isinstance(value, Curve):
            changed[name] = Curve(value.x, tuple(y * factor for y in value.y))
        elif isinstance(value, Grid):
            rows = tuple(tuple(z * factor for z in row) for row in value.z)
            changed[name] = Grid(value.x, value.y, rows)
        else:
            changed[name] = value * factor
    return replace(hardware, **changed) if changed else hardware
