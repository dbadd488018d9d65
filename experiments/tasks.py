"""Completion time of offline tasks: all requests, prefill and decode together.

Times are of the same requests with the same cap on generated tokens, so bars can be compared
within a task; between tasks lengths differ.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments import style
from experiments.table import significant


def completion(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Minutes per task and policy, a panel a machine."""
    style.require(results, "policy", "workload", "hardware", "makespan_s")
    machines = list(results["hardware"].unique())
    policies = list(results["policy"].unique())
    first = style.ok(results).iloc[0]
    cap = "uncapped" if pd.isna(first["max_new"]) else f"at most {first['max_new']:g} new tokens"
    title = (f"Time to complete {first['n_requests']:g} requests ({cap}), "
             f"{results['model'].iloc[0]}")  # fmt: skip
    with style.panels(path, title, (len(machines), 1), (9.0, 2.9), sharex=True) as out:
        for row, machine in enumerate(machines):
            axes = out.axes[row][0]
            _bars(axes, results[results["hardware"] == machine], policies)
            axes.set_title(machine)
            axes.set_ylabel("completion time (min)")
        style.legend_below(
            out.figure, [Patch(facecolor=style.colour(p, policies), label=p) for p in policies]
        )


def _bars(axes: Axes, rows: pd.DataFrame, policies: list[str]) -> None:
    tasks = list(rows["workload"].unique())
    width = 0.84 / len(policies)
    for i, policy in enumerate(policies):
        for at, task in enumerate(tasks):
            x = at + (i - (len(policies) - 1) / 2) * width
            found = rows[(rows["policy"] == policy) & (rows["workload"] == task)]
            good = style.ok(found)
            if good.empty:
                if not found.empty:
                    axes.annotate(found["status"].iloc[0], (x, 0), rotation=90, ha="center",
                                  va="bottom", fontsize=8)  # fmt: skip
                continue
            minutes = good["makespan_s"].iloc[0] / 60
            bar = axes.bar(x, minutes, width, color=style.colour(policy, policies))
            axes.bar_label(bar, labels=[significant(minutes)], fontsize=8, padding=1)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.margins(y=0.12)
    axes.grid(visible=False, axis="x")
