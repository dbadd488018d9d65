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
    """Requests per second of each prefix policy under fifo."""
    style.require(results, "prefix", "admission", "hardware", "workload", "requests_per_s")
    rows = style.ok(results)
    first = rows["admission"].iloc[0]
    rows = rows[rows["admission"] == first]
    _bars(rows, path, "prefix", PREFIXES, "requests_per_s", f"requests/s with {first}", "load-all")


def admissions(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """New tokens an iteration of each admission policy when everything is loaded."""
    style.require(results, "prefix", "admission", "hardware", "workload", "scheduled_tokens_mean")
    rows = style.ok(results)
    first = rows["prefix"].iloc[0]
    rows = rows[rows["prefix"] == first]
    words = f"new tokens an iteration, first half, with {first}"
    column = "scheduled_tokens_first_half"
    _bars(rows, path, "admission", ADMISSIONS, column, words, "fifo")


def _bars(
    rows: pd.DataFrame,
    path: Path,
    by: str,
    colours: dict[str, str],
    column: str,
    words: str,
    base: str,
) -> None:
    machines = list(rows["hardware"].unique())
    found = [name for name in colours if name in set(rows[by])]
    title = f"{rows['model'].iloc[0]}: {words}"
    with style.panels(path, title, (1, len(machines)), (5.0, 3.0)) as out:
        for axes, machine in zip(out.axes[0], machines, strict=True):
            table = rows[rows["hardware"] == machine].pivot_table(
                index="workload", columns=by, values=column, sort=False
            )
            relative = table.div(table[base], axis=0) if base in table else table
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
            axes.set_title(machine)
        out.axes[0][0].set_ylabel(f"relative to {base}")
        handles = [
            out.axes[0][0].bar([0], [float("nan")], color=colours[name], label=name)
            for name in found
        ]
        style.legend_below(out.figure, handles)
