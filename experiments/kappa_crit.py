"""kappa_crit by model and machine: formula, simulator, paper, and what measured curves make of it.

What readers get wrong: the paper's numbers and ours differ mostly by the FLOP rate. Its C is FP8
dense, the models run in FP16, so its kappa_crit is half of what the same link gives here.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments import style

SERIES = {  # column: (words, marker)
    "kappa_crit": ("formula, measured rates", "o"),
    "kappa_crit_simulated": ("simulator, constant rates", "x"),
    "kappa_crit_t4096": ("simulator, measured curves, T = 4096", "v"),
    "kappa_crit_t512": ("T = 512", "^"),
    "kappa_crit_t64": ("T = 64", "<"),
    "kappa_crit_paper": ("paper's formula and constants", "s"),
}
_COLOURS = ("#0072B2", "#000000", "#009E73", "#56B4E9", "#CC79A7", "#D55E00")


def compared(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """A panel a model: every reading of kappa_crit, machines from left to right."""
    style.require(results, "model", "hardware", *SERIES)
    rows = style.ok(results)
    models = list(rows["model"].unique())
    title = "kappa_crit: the K/T beyond which loading a prefix takes longer than computing"
    with style.panels(path, title, (len(models), 1), (9.0, 2.1), sharex=True) as out:
        for axes, model in zip(out.each(), models, strict=True):
            part = rows[rows["model"] == model]
            places = range(len(part))
            for (column, (_, marker)), colour in zip(SERIES.items(), _COLOURS, strict=True):
                axes.plot(places, part[column], marker, color=colour, fillstyle="none")
            axes.set_yscale("log")
            axes.set_ylabel(f"{model}\nkappa_crit")
            axes.set_xticks(list(places), list(part["hardware"]), rotation=20, ha="right")
        first = out.axes[0][0]
        handles = [
            first.plot([], [], marker, color=colour, fillstyle="none", label=words)[0]
            for (words, marker), colour in zip(SERIES.values(), _COLOURS, strict=True)
        ]
        style.legend_below(out.figure, handles, n_columns=3)
