"""Power: idle plus activity, with constants that are calibrated inputs.

    P = base + (TDP - base) * min(1, a_busy * u_busy + a_flops * u_flops + a_copy * u_copy)

``u_busy`` and ``u_copy`` are shares of time in which the GPU computes and copies, ``u_flops`` is
the share of its best FLOP rate that it reaches; base is idle with a CUDA context. What readers get
wrong: no constant here is derived. Decode keeps a GPU busy at a few per cent of its FLOP rate and
draws 20 to 40 % of the TDP, a full prefill nearly all of it (papers.md 6.7).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.spec.curve import Curve, Grid
from policies.spec.hardware import OPTIONAL, HardwareProfile

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Constants of one group of GPUs; activities are shares of the dynamic range."""

    idle_watts: float
    tdp_watts: float
    best_flops_per_s: float
    context_watts: float = 0.0
    busy_activity: float = 0.3
    flops_activity: float = 0.7
    copy_activity: float = 0.05
    window_s: float = 1.0
    cap_watts: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.idle_watts + self.context_watts <= self.tdp_watts:
            raise ValueError(
                f"power: idle {self.idle_watts} W and context {self.context_watts} W must be "
                f"within the TDP of {self.tdp_watts} W"
            )
        if not self.best_flops_per_s > 0:
            raise ValueError(f"power: best_flops_per_s {self.best_flops_per_s} must be > 0")
        for name in ("busy_activity", "flops_activity", "copy_activity"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"power.{name}: {getattr(self, name)} must be in [0, 1]")
        if not self.window_s > 0:
            raise ValueError(f"power.window_s: {self.window_s} must be > 0")
        cap = self.cap_watts
        if cap is not None and not self.base_watts < cap <= self.tdp_watts:
            raise ValueError(
                f"cap_watts: {cap:g} must be in ({self.base_watts:g}, {self.tdp_watts:g}]"
            )

    @property
    def base_watts(self) -> float:
        """Without activity."""
        return self.idle_watts + self.context_watts

    def watts(self, busy: float, flops: float, copy: float) -> float:
        """Mean power over a time with these shares."""
        activity = (
            self.busy_activity * busy + self.flops_activity * flops + self.copy_activity * copy
        )
        watts = self.base_watts + (self.tdp_watts - self.base_watts) * min(1.0, activity)
        return watts if self.cap_watts is None else min(watts, self.cap_watts)

    def over(
        self, start_s: Seconds, busy_s: Seconds, flops_s: Seconds, copy_s: Seconds, end_s: float
    ) -> tuple[float, float]:
        """Mean and maximum watts over windows of ``window_s``; arrays of shape (iterations,).

        ``flops_s`` is the time that an iteration's FLOPs would take at the best rate. An iteration
        counts in the window in which it starts; none is longer than a few windows.
        """
        n = max(1, int(np.ceil(end_s / self.window_s)))
        at = np.minimum((start_s / self.window_s).astype(np.int64), n - 1)
        # Windows without a start are idle and alike: a sparse replay has billions of them.
        windows, index = np.unique(at, return_inverse=True)
        last_s = max(end_s - (n - 1) * self.window_s, 1e-9)
        widths = np.where(windows == n - 1, last_s, self.window_s)

        def share(seconds: Seconds) -> Seconds:
            busy: Seconds = np.bincount(index, seconds, len(windows)) / widths
            return np.clip(busy, 0.0, 1.0)

        watts = [
            self.watts(busy, flops, copy)
            for busy, flops, copy in zip(
                share(busy_s).tolist(), share(flops_s).tolist(), share(copy_s).tolist(), strict=True
            )
        ]
        whole_s = (n - 1) * self.window_s + last_s
        idle_s = max(0.0, whole_s - float(widths.sum())) if len(windows) < n else 0.0
        idle_watts = self.watts(0.0, 0.0, 0.0)
        joules = float(np.dot(watts, widths)) + idle_watts * idle_s
        return joules / whole_s, max([*watts, idle_watts] if idle_s else watts)


def capped(hardware: HardwareProfile, power: PowerModel) -> HardwareProfile:
    """The machine under ``power.cap_watts``: what-if, its GPU slowed until it draws no more.

    Dynamic power is taken to be proportional to speed. The best FLOP rates fall to the share
    ``(cap - base) / (dynamic * (a_busy + a_flops))``; memory slows only where a GPU that is busy
    without arithmetic would draw more than the cap. Links keep their rates.
    """
    if power.cap_watts is None:
        return hardware
    room = (power.cap_watts - power.base_watts) / (power.tdp_watts - power.base_watts)
    full = power.busy_activity + power.flops_activity
    flops = min(1.0, room / full) if full else 1.0
    memory = min(1.0, room / power.busy_activity) if power.busy_activity else 1.0

    def lowered(curve: Curve) -> Curve:
        most = flops * max(curve.y)
        return Curve(curve.x, tuple(min(memory * y, most) for y in curve.y))

    def throttled(curve: Curve) -> Curve:
        return Curve(curve.x, tuple(memory * y for y in curve.y))

    window = hardware.attention_window
    measured = ((name, getattr(hardware, name)) for name in OPTIONAL)
    optional: dict[str, Any] = {name: throttled(curve) for name, curve in measured if curve}
    most = flops * max(max(row) for row in window.z)
    return replace(
        hardware,
        name=f"{hardware.name}@{power.cap_watts / hardware.n_gpus:.0f}W",
        hbm_bytes_per_s=memory * hardware.hbm_bytes_per_s,
        gemm=lowered(hardware.gemm),
        attention_decode=throttled(hardware.attention_decode),
        attention_prefill=lowered(hardware.attention_prefill),
        attention_window=Grid(
            window.x, window.y, tuple(tuple(min(memory * z, most) for z in row) for row in window.z)
        ),
        **optional,
    )
