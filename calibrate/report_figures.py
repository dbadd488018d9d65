"""Figures of a comparison: simulated against measured cells, and errors by kind of op."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from calibrate.report import Report

_COLOURS = {"pinned": "#0072b2", "pageable": "#d55e00", "disk": "#009e73"}  # Okabe and Ito


def draw_cells(report: Report, path: Path) -> None:
    """Simulated against measured seconds of every cell, with bands of the worst errors allowed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    for memory, colour in _COLOURS.items():
        for phase, marker in (("prefill", "s"), ("step", "o")):
            cells = [
                cell
                for run in report.runs
                if run.memory == memory
                for cell in run.cells
                if cell.name == phase
            ]
            if cells:
                label = f"{phase}, {memory}{'' if memory == 'disk' else ' host memory'}"
                x, y = [c.real_s for c in cells], [c.sim_s for c in cells]
                axes.plot(x, y, marker, ms=5, color=colour, mfc="none", label=label)
    times = [t for run in report.runs for c in run.cells for t in (c.real_s, c.sim_s)]
    ends = np.array([0.8 * min(times, default=1.0), 1.25 * max(times, default=1.0)])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    bands = sorted({v.tolerance.worst for v in report.verdicts}, reverse=True)
    for i, band in enumerate(bands):
        shade = str(0.93 - 0.08 * i)
        axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=shade, zorder=-2 + i)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, s")
    axes.set_ylabel("simulated, s")
    within = " and ".join(f"{band:.0%}" for band in reversed(bands))
    axes.set_title(f"{report.profile}: prefill and decode step, bands of {within}", fontsize=10)
    if times:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def draw_kinds(report: Report, path: Path) -> None:
    """Spread of the errors of single ops, a box a kind; whiskers hold nine tenths of the ops."""
    from matplotlib.figure import Figure

    errors: dict[str, list[float]] = {}
    for run in report.runs:
        for key in run.comparison.keys:
            if key.real_s > 0:
                errors.setdefault(key.kind, []).append(100 * key.error)
    figure = Figure(figsize=(7, 0.8 + 0.45 * max(2, len(errors))), layout="constrained")
    axes = figure.subplots()
    if errors:
        axes.boxplot(
            list(errors.values()),
            orientation="horizontal",
            tick_labels=list(errors),
            whis=(5, 95),
            showfliers=False,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=10, linscale=1)  # one bad kind must not flatten the others
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("error of an op's seconds, % (positive: simulator slow)")
    axes.set_title(f"{report.profile}: ops by kind")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=130)
