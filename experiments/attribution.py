"""Waterfall from Accelerate to TightLLM: which change is worth how much.

Each bar is one change on top of all changes left of it; factors multiply to the total. What
readers get wrong: the factor of a change depends on what came before it. Recompute is worth more
once weights are no longer what everybody waits for.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from experiments import style
from experiments.table import significant
from experiments.throughput import METRICS, plain_log_axis

STEP = "override.step"
_UP, _DOWN, _TOTAL = "#009E73", "#D55E00", "#0072B2"
_PANEL = ["hardware", "prompt_len"]


def factors(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Throughput, factor of each step over the one before it, and over the first one.

    Rows in the order of the steps' numbers, per (hardware, prompt_len); NaN where a step did not
    run, and then the next one is compared with the last that did. ``ValueError`` if the steps of a
    panel did not process the same requests.
    """
    style.require(results, STEP, "policy", "n_requests", *_PANEL, metric)
    parts = []
    for key, rows in results.sort_values(STEP).groupby(_PANEL, sort=False):
        good = style.ok(rows)
        if good["n_requests"].nunique() > 1:
            seen = ", ".join(f"{n:g}" for n in sorted(good["n_requests"].unique()))
            raise ValueError(f"results: steps of {key} ran {seen} requests, must be the same")
        part = rows[[*_PANEL, STEP, "policy", "status"]].copy()
        part["tokens_per_s"] = rows[metric].where(rows["status"] == "ok")
        known = part["tokens_per_s"].ffill()
        part["factor"] = part["tokens_per_s"] / known.shift()
        part["total"] = part["tokens_per_s"] / known.dropna().iloc[0]
        parts.append(part)
    return pd.concat(parts)


def decode(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """The waterfall of decode throughput."""
    _draw(results, path, "decode_tokens_per_s")


def prefill(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """The waterfall of prefill throughput."""
    _draw(results, path, "prefill_tokens_per_s")


def _draw(results: pd.DataFrame, path: Path, metric: str) -> None:
    table = factors(results, metric)
    machines = list(table["hardware"].unique())
    lengths = sorted(table["prompt_len"].dropna().unique())
    what = METRICS[metric].split()[0]
    title = f"From Accelerate to TightLLM: {what} throughput, {results['model'].iloc[0]}"
    with style.panels(path, title, (len(machines), len(lengths)), (5.4, 2.9), sharex=True,
                      sharey="row") as out:  # fmt: skip
        for row, machine in enumerate(machines):
            for column, length in enumerate(lengths):
                axes = out.axes[row][column]
                part = table[(table["hardware"] == machine) & (table["prompt_len"] == length)]
                ran = style.ok(results[(results["hardware"] == machine)
                                       & (results["prompt_len"] == length)])  # fmt: skip
                if not ran.empty:
                    _waterfall(axes, part)
                    axes.set_title(f"{machine}, prompt {style.tokens(length)}, "
                                   f"{ran['n_requests'].iloc[0]:g} sequences")  # fmt: skip
                if column == 0:
                    axes.set_ylabel("times the first step")


def _waterfall(axes: Axes, part: pd.DataFrame) -> None:
    before = 1.0
    top = max(1.0, part["total"].max())
    for i, (_, step) in enumerate(part.iterrows()):
        if pd.isna(step["total"]):
            axes.annotate(step["status"], (i, before), ha="center", va="bottom", color=_DOWN)
            continue
        after = step["total"]
        if i == 0:
            text = f"{significant(step['tokens_per_s'])}\ntok/s"
            axes.plot([i - 0.4, i + 0.4], [1.0, 1.0], color=_TOTAL, lw=3)
        else:
            shade = _UP if after >= before else _DOWN
            axes.bar(i, after - before, 0.8, bottom=before, color=shade)
            axes.plot([i - 0.4, i + 0.4], [after, after], color=shade, lw=1.6)
            text = f"×{step['factor']:.2f}"
            axes.plot([i - 1.4, i - 0.4], [before, before], color="#888888", lw=0.7)
        axes.annotate(text, (i, max(before, after)), xytext=(0, 3), textcoords="offset points",
                      ha="center", va="bottom", fontsize=8)  # fmt: skip
        before = after
    last = len(part)
    axes.bar(last, before - 1.0, 0.8, bottom=1.0, color=_TOTAL)
    axes.annotate(f"×{before:.2f}", (last, before), xytext=(0, 3), textcoords="offset points",
                  ha="center", va="bottom", fontsize=8, fontweight="bold")  # fmt: skip
    axes.axhline(1.0, color="#333333", lw=0.8)
    axes.set_yscale("log")
    axes.set_ylim(min(0.9, 0.85 * part["total"].min()), 1.45 * max(top, axes.get_ylim()[1] / 1.4))
    axes.set_xticks(range(last + 1), [*part["policy"], "in all"], rotation=35, ha="right",
                    fontsize=8.5)  # fmt: skip
    axes.grid(visible=False, axis="x")
    plain_log_axis(axes)
