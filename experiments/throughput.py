"""Throughput per policy: lines over the prompt length, or bars where it is the same everywhere.

A marker says what the run waits on most, over prefill and decode together. A policy that ran out
of memory has a cross at the bottom edge, not a gap that reads like a missing run.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from experiments import style
from experiments.table import significant

METRICS = {
    "decode_tokens_per_s": "decode (tokens/s)",
    "prefill_tokens_per_s": "prefill (tokens/s)",
}
_PANEL = ["model", "hardware"]
_BLOCK = "override.workload.n_batches"  # as set: Accelerate's blocks have one batch whatever is set


def both(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Decode and prefill throughput."""
    _draw(results, path, list(METRICS), "Throughput")


def decode(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Decode throughput alone."""
    _draw(results, path, ["decode_tokens_per_s"], "Decode throughput")


def prefill(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Prefill throughput alone."""
    _draw(results, path, ["prefill_tokens_per_s"], "Prefill throughput")


def _draw(results: pd.DataFrame, path: Path, metrics: list[str], what: str) -> None:
    style.require(results, "policy", "bottleneck", *_PANEL, *metrics)
    drawn = [m for m in metrics if results[m].notna().any()]
    lengths = results["prompt_len"].nunique() > 1 and results["workload"].nunique() == 1
    key = [*_PANEL, _BLOCK] if _BLOCK in results else _PANEL
    groups = list(results.groupby(key, sort=False))
    title = f"{what} against prompt length" if lengths else f"{what} by policy"
    models = ", ".join(results["model"].dropna().unique())
    shape = (len(drawn), len(groups))
    policies = list(results["policy"].unique())
    with style.panels(path, f"{title}, {models}", shape, (4.3, 3.1)) as out:
        for column, (_, rows) in enumerate(groups):
            for row, metric in enumerate(drawn):
                axes = out.axes[row][column]
                if lengths:
                    _lines(axes, rows, metric, policies)
                else:
                    _bars(axes, rows, metric, policies)
                if column == 0:
                    axes.set_ylabel(METRICS[metric])
            out.axes[0][column].set_title(_title(rows, results))
        style.legend_below(out.figure, _legend(results, policies, lengths))


def _title(rows: pd.DataFrame, results: pd.DataFrame) -> str:
    title = str(rows["hardware"].iloc[0])
    if results["model"].nunique() > 1:
        title = f"{rows['model'].iloc[0]} on {title}"
    if _BLOCK in results:
        n = int(rows[_BLOCK].iloc[0])
        title += f", {n} {'batch' if n == 1 else 'batches'} of {rows['batch_size'].max():g}"
    return title


def _lines(axes: Axes, rows: pd.DataFrame, metric: str, policies: list[str]) -> None:
    lost: list[tuple[float, str]] = []
    for i, policy in enumerate(policies):
        over = len(policies) - 1 - i  # lines that coincide: dashes over solid, small over large
        line = rows[rows["policy"] == policy].sort_values("prompt_len")
        good = style.ok(line).dropna(subset=[metric])
        shade = style.colour(policy, policies)
        axes.plot(good["prompt_len"], good[metric], color=shade, ls="--" if i == 2 else "-")
        for _, point in good.iterrows():
            marker = style.BOTTLENECKS.get(point["bottleneck"], ("o", ""))[0]
            size = (9.0 if marker == "*" else 5.5) + 1.5 * min(over, 4)
            axes.plot(point["prompt_len"], point[metric], marker, color=shade, ms=size)
        lost += [(n, policy) for n in line.loc[line["status"] == "oom", "prompt_len"]]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _cross_out(axes, lost, policies)
    axes.xaxis.set_major_locator(FixedLocator(sorted(rows["prompt_len"].dropna().unique())))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: style.tokens(n)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("prompt length (tokens)")
    plain_log_axis(axes)


def _cross_out(axes: Axes, lost: list[tuple[float, str]], policies: list[str]) -> None:
    """Crosses along the bottom edge, stacked where several policies fail at one length."""
    if not lost:
        return
    height: dict[float, int] = {}
    most = max(sum(1 for other, _ in lost if other == n) for n, _ in lost)
    low, high = axes.get_ylim()
    share = 0.02 + 0.07 * most  # of the height, kept free of lines
    axes.set_ylim(low * (low / high) ** (share / (1.0 - share)), high)
    for n, policy in lost:
        level = height.get(n, 0)
        height[n] = level + 1
        axes.plot(n, 0.04 + 0.07 * level, "x", color=style.colour(policy, policies), ms=8, mew=2.2,
                  transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip


def plain_log_axis(axes: Axes) -> None:
    """Tick labels of a logarithmic y axis as plain numbers, at least two of them."""
    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high / low > 4 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    ticks = [s * 10.0**e for e in range(-6, 8) for s in steps if low <= s * 10.0**e <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def _bars(axes: Axes, rows: pd.DataFrame, metric: str, policies: list[str]) -> None:
    present = [name for name in policies if name in set(rows["policy"])]
    for i, policy in enumerate(present):
        found = rows[rows["policy"] == policy]
        good = style.ok(found).dropna(subset=[metric])
        if good.empty:
            axes.annotate(str(found["status"].iloc[0]), (i, 0), ha="center", va="bottom")
            continue
        bar = axes.bar(i, good[metric].mean(), color=style.colour(policy, policies), width=0.7)
        axes.bar_label(bar, labels=[significant(good[metric].mean())], padding=2)
    axes.set_xticks(range(len(present)), present, rotation=20, ha="right")
    axes.set_xlim(-0.6, len(present) - 0.4)
    axes.margins(y=0.15)
    axes.grid(visible=False, axis="x")


def _legend(results: pd.DataFrame, policies: list[str], lines: bool) -> list[Line2D]:
    if not lines:
        return [Line2D([], [], color=style.colour(p, policies), lw=6, label=p) for p in policies]
    handles = [
        Line2D([], [], color=style.colour(p, policies), ls="--" if i == 2 else "-", label=p)
        for i, p in enumerate(policies)
    ]
    seen = set(results["bottleneck"].dropna())
    for name, (marker, words) in style.BOTTLENECKS.items():
        if name in seen:
            handles.append(Line2D([], [], color="#555555", marker=marker, ls="",
                                  label=f"waits most on {words}"))  # fmt: skip
    if (results["status"] == "oom").any():
        handles.append(Line2D([], [], color="#555555", marker="x", ls="", mew=2.2,
                              label="out of memory"))  # fmt: skip
    return handles
