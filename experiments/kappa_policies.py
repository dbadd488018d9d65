"""What prefix and admission policies are worth, by workload and link.

What readers get wrong: bars are throughputs relative to load-all with fifo of the same panel. A
bar near 1 is a result: on a healthy link recompute has next to nothing to gain for a GQA model.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments import style
from experiments.table import significant

PREFIXES = {"load-all": "#56B4E9", "recompute-all": "#D55E00", "adaptive": "#0072B2",
            "cake": "#009E73"}  # fmt: skip
ADMISSIONS = {"fifo": "#999999", "vram-aware": "#E69F00", "utilisation-aware": "#0072B2",
              "fair-share": "#CC79A7"}  # fmt: skip


def prefixes(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Requests per second of each prefix policy under fifo, a panel a machine."""
    style.require(results, "prefix", "admission", "hardware", "workload", "requests_per_s")
    rows = style.ok(results)
    first = rows["admission"].iloc[0]
    rows = rows[rows["admission"] == first]
    panels = {
        str(machine): (rows[rows["hardware"] == machine], "requests_per_s")
        for machine in rows["hardware"].unique()
    }
    title = f"{rows['model'].iloc[0]}: requests/s with {first}"
    _bars(panels, path, title, "prefix", PREFIXES, "load-all")


def admissions(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """New tokens an iteration of each admission policy: over the first half, and over all."""
    columns = {
        "first half of the replay": "scheduled_tokens_first_half",
        "whole replay": "scheduled_tokens_mean",
    }
    style.require(results, "prefix", "admission", "hardware", "workload", *columns.values())
    rows = style.ok(results)
    prefix, machine = rows["prefix"].iloc[0], rows["hardware"].iloc[0]
    rows = rows[(rows["prefix"] == prefix) & (rows["hardware"] == machine)]
    panels = {words: (rows, column) for words, column in columns.items()}
    title = f"{rows['model'].iloc[0]} on {machine}: new tokens an iteration, with {prefix}"
    _bars(panels, path, title, "admission", ADMISSIONS, "fifo")


def _bars(
    panels: dict[str, tuple[pd.DataFrame, str]],
    path: Path,
    title: str,
    by: str,
    colours: dict[str, str],
    base: str,
) -> None:
    present = {name for rows, _ in panels.values() for name in rows[by]}
    if base not in present:
        raise ValueError(f"{by}: no run of {base}, which the bars are relative to")
    found = [name for name in colours if name in present]
    with style.panels(path, title, (1, len(panels)), (5.0, 3.0)) as out:
        for axes, (words, (rows, column)) in zip(out.axes[0], panels.items(), strict=True):
            table = style.pivot(rows, ("workload",), by, column)
            relative = table.div(table[base], axis=0)
            width = 0.8 / len(found)
            for i, name in enumerate(found):
                places = [p + (i - (len(found) - 1) / 2) * width for p in range(len(table))]
                bars = axes.bar(places, relative[name], width * 0.92, color=colours[name])
                axes.bar_label(bars, [significant(v) for v in table[name]], fontsize=7, padding=1)
            axes.axhline(1.0, color="#333333", lw=0.8)
            if relative.min().min() < 0.2:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
                axes.yaxis.set_minor_formatter(lambda _v, _i: "")
            axes.set_xticks(range(len(table)), list(table.index))
            axes.grid(visible=False, axis="x")
            axes.set_title(words)
        out.axes[0][0].set_ylabel(f"relative to {base}")
        handles = [
            out.axes[0][0].bar([0], [float("nan")], color=colours[name], label=name)
            for name in found
        ]
        style.legend_below(out.figure, handles)
