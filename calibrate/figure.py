"""One figure of a fit: measured points against what the profile says, a panel a number.

Panels show rates over the amount that a number depends on, so a curve can be seen; points are
medians with the range of their repeats, held-out points are hollow. Lines end where points end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.predict import predicted_s, work
from calibrate.quality import GROUPS_OF
from calibrate.record import Point
from policies.spec.hardware import HardwareProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AXIS = {
    "gemm": ("rows", "rows"),
    "layer_norm": ("rows", "rows"),
    "rms_norm": ("rows", "rows"),
    "rotary": ("rows", "rows"),
    "attention_decode": ("keys", "context, tokens"),
    "attention_prefill": ("keys", "context, tokens"),
    "attention_window": ("queries", "queries"),
    "attention_unfused_decode": ("keys", "context, tokens"),
    "attention_unfused_scores": ("keys", "context, tokens"),
    "cpu_attention_bytes_per_s": ("keys", "context, tokens"),
}
_FLOPS = ("gemm", "attention_prefill", "attention_window")
_UNITS = {**dict.fromkeys(_FLOPS, "FLOP/s"), "attention_unfused_scores": "scores/s"}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito


def draw_fit(points: Sequence[Point], hardware: HardwareProfile, path: Path) -> None:
    """Draw all timed groups of a measurement into one file."""
    from matplotlib.figure import Figure

    shown = [
        (field, timed)
        for field, groups in GROUPS_OF.items()
        if field not in ("launch_s", "sync_s")
        and (timed := [p for p in points if p.group in groups and p.seconds])
    ]
    columns = 4
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for axes, (field, timed) in zip(grid, shown, strict=False):
        _panel(axes, field, timed, hardware)
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    figure.suptitle(f"{hardware.name}: measured (dots) and fitted (lines); hollow: held out")
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, field: str, points: Sequence[Point], hardware: HardwareProfile) -> None:
    key, label = _AXIS.get(field, ("nbytes", "bytes"))
    series: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        other = (v for k, v in point.x.items() if k not in (key, "batch", "elem_bytes"))
        fixed = tuple(other) if field in ("gemm", "attention_window") else ()
        series.setdefault((point.group, *fixed), []).append(point)
    for i, group in enumerate(series.values()):
        colour = _COLOURS[i % len(_COLOURS)]
        group.sort(key=lambda p: p.x[key])
        x = np.array([p.x[key] for p in group])
        amount = np.array([work(p.group, p.x) for p in group])
        low, mid, high = (
            amount / np.array([f(p.seconds) for p in group]) for f in (max, np.median, min)
        )
        said = amount / np.array([predicted_s(hardware, p.group, p.x) for p in group])
        axes.vlines(x, low, high, color=colour, linewidth=1, alpha=0.5)
        for fitted, face in ((True, colour), (False, "white")):
            chosen = np.array([p.fit is fitted for p in group])
            axes.plot(x[chosen], mid[chosen], "o", ms=4, color=colour, mfc=face, mew=1)
        axes.plot(x, said, "-", color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(field, fontsize=10)
    axes.set_xlabel(label, fontsize=8)
    axes.set_ylabel(_UNITS.get(field, "bytes/s"), fontsize=8)
    axes.tick_params(which="both", labelsize=7)
    axes.grid(alpha=0.3, linewidth=0.5)
