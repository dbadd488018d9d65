"""Rooflines of an offloaded prefill: FLOP/s against K/T, flat up to kappa_crit, falling beyond.

The paper's Figures 4 and 7. Throughput is ``C * min(1, kappa_crit / kappa_ratio)`` with perfect
overlap. What readers get wrong: the dots at the top of each fall are different machines; a faster
GPU behind the same link falls earlier.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments import style

WORKLOADS = {"ShareGPT": 100, "NarrativeQA": 5000, "FinQA": 10_000}  # the paper's median K/T
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def rooflines(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """A panel a model; vertical lines are the workloads' median ratios as printed."""
    style.require(results, "model", "hardware", "kappa_crit", "flops_per_s")
    rows = style.ok(results)
    models = list(rows["model"].unique())
    machines = list(rows["hardware"].unique())
    ratios = np.logspace(-1, 5, 200)
    columns = min(3, len(models))
    shape = (-(-len(models) // columns), columns)
    title = "Prefill rate behind the link, perfect overlap"
    with style.panels(path, title, shape, (4.2, 3.0), sharex=True, sharey="row") as out:
        axes_of = list(out.each())
        for axes, model in zip(axes_of, models, strict=False):
            part = rows[rows["model"] == model].set_index("hardware")
            for machine, colour in zip(machines, _COLOURS, strict=False):
                if machine in part.index:
                    crit, most = part.loc[machine, ["kappa_crit", "flops_per_s"]]
                    rate = most / 1e12 * np.minimum(1.0, crit / ratios)
                    axes.plot(ratios, rate, color=colour)
                    axes.plot([crit], [most / 1e12], "o", color=colour, ms=4)
            for words, ratio in WORKLOADS.items():
                axes.axvline(ratio, color="#777777", ls=":", lw=1)
                axes.text(
                    ratio, 0.02, f" {words}", rotation=90, va="bottom", ha="right", fontsize=7,
                    color="#555555", transform=axes.get_xaxis_transform(),
                )  # fmt: skip
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(model)
        for axes in axes_of[len(models) :]:
            axes.set_axis_off()
        for row in out.axes:
            row[0].set_ylabel("TFLOP/s")
        for axes in out.axes[-1]:
            axes.set_xlabel("K / T")
        handles = [
            axes_of[0].plot([], [], color=colour, label=machine)[0]
            for machine, colour in zip(machines, _COLOURS, strict=False)
        ]
        style.legend_below(out.figure, handles)
