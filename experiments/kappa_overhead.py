"""Transfer overhead (POH) against K/T: the line of the formula, and points of measured curves.

The paper's Figures 5 and 6. A run's row holds the K/T at which load and compute are equal for three
T; POH grows in proportion to K, so each of them is a line. What readers get wrong: with few new
tokens the GPU's time does not shrink with T, so POH at a given K/T is *smaller* than the formula's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments import style

POINTS = {"kappa_crit_t64": "T = 64", "kappa_crit_t512": "T = 512", "kappa_crit_t4096": "T = 4096"}
_COLOURS = ("#CC79A7", "#56B4E9", "#009E73")
PAPER = (1024, 86.0)  # K/T of 65K over 64, Qwen3-235B on the paper's machine
MACHINE = "h100x8-paper"


def overhead(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """A panel a model, on the paper's machine or the first there is."""
    style.require(results, "model", "hardware", "kappa_crit", *POINTS)
    rows = style.ok(results)
    machine = MACHINE if MACHINE in set(rows["hardware"]) else rows["hardware"].iloc[0]
    rows = rows[rows["hardware"] == machine]
    ratios = np.logspace(-1, 4, 100)
    columns = min(3, len(rows))
    shape = (-(-len(rows) // columns), columns)
    title = f"Load over compute time on {machine} (1: both equal)"
    with style.panels(path, title, shape, (4.0, 2.9), sharex=True, sharey="row") as out:
        axes_of = list(out.each())
        for axes, (_, row) in zip(axes_of, rows.iterrows(), strict=False):
            axes.plot(ratios, ratios / row["kappa_crit"], color="#000000", lw=1.2)
            for (column, _), colour in zip(POINTS.items(), _COLOURS, strict=True):
                axes.plot(ratios, ratios / row[column], color=colour, ls="--")
            axes.axhline(1.0, color="#777777", lw=0.8)
            if row["model"] == "qwen3-235b-a22b":
                axes.plot(*PAPER, "s", color="#D55E00", fillstyle="none")
                axes.annotate("paper: 86\n(T = 64)", PAPER, xytext=(9, -3), ha="left",
                              textcoords="offset points", fontsize=7, color="#D55E00")  # fmt: skip
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(row["model"])
        for axes in axes_of[len(rows) :]:
            axes.set_axis_off()
        for row_axes in out.axes:
            row_axes[0].set_ylabel("POH")
        for axes in out.axes[-1]:
            axes.set_xlabel("K / T")
        first = axes_of[0]
        handles = [first.plot([], [], color="#000000", label="formula")[0]]
        handles += [
            first.plot([], [], color=colour, ls="--", label=f"measured curves, {words}")[0]
            for words, colour in zip(POINTS.values(), _COLOURS, strict=True)
        ]
        style.legend_below(out.figure, handles)
