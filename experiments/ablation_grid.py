"""The ablation over models and machines: what each of TightLLM's components is worth, and where.

A panel a model on a machine, the share of throughput lost without a component over prompt length.
What readers get wrong: an empty place in a panel is a run that does not fit, not a loss of zero.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.lines import Line2D

from experiments import style
from experiments.ablation import FULL, WITHOUT
from experiments.throughput import METRICS


def losses(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Share of throughput lost: rows (model, hardware, prompt_len), a column a variant."""
    keys = ("model", "hardware", "prompt_len")
    table = style.pivot(style.ok(results), keys, "policy", metric)
    if FULL not in table:
        raise ValueError(f"results: no run of policy {FULL} to compare with")
    return 1.0 - table[[name for name in WITHOUT if name in table]].div(table[FULL], axis=0)


def decode(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Losses of decode throughput."""
    _draw(results, "decode_tokens_per_s", path)


def prefill(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Losses of prefill throughput."""
    _draw(results, "prefill_tokens_per_s", path)


def _draw(results: pd.DataFrame, metric: str, path: Path) -> None:
    style.require(results, "policy", "model", "hardware", "prompt_len", metric)
    table = losses(results, metric)
    models, machines = list(results["model"].unique()), list(results["hardware"].unique())
    lengths = sorted(results["prompt_len"].dropna().unique())
    title = f"Loss of {METRICS[metric]} without a component"
    shape = (len(models), len(machines))
    with style.panels(path, title, shape, (2.9, 1.5), sharex=True, sharey=True) as out:
        for row, model in enumerate(models):
            for column, machine in enumerate(machines):
                axes = out.axes[row][column]
                if (model, machine) in table.index.droplevel(2):
                    cell = table.loc[(model, machine)].reindex(lengths)
                    for name in cell:
                        axes.plot(range(len(lengths)), 100 * cell[name], marker="o",
                                  markersize=3.5, color=style.colour(str(name)))  # fmt: skip
                axes.set_xticks(range(len(lengths)), [style.tokens(n) for n in lengths])
                if row == 0:
                    axes.set_title(machine)
                if column == 0:
                    axes.set_ylabel(f"{model}\n%")
        handles = [Line2D([], [], marker="o", color=style.colour(name), label=words)
                   for name, words in WITHOUT.items()]  # fmt: skip
        style.legend_below(out.figure, handles)
