"""Throughput per policy: lines over the prompt length, or a bar a run where they are not lines.

A marker says what the run waits on most, over prefill and decode together. A policy that ran out
of memory has a cross at the bottom edge, not a gap that reads like a missing run.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from experiments import style
from experiments.table import significant, swept_columns

METRICS = {
    "decode_tokens_per_s": "decode (tokens/s)",
    "prefill_tokens_per_s": "prefill (tokens/s)",
}
_PANEL = ["model", "hardware"]
_FEW = 6  # policies whose lines and markers may be drawn large
_CROSSES = 0.35  # of the height, at most, for what ran out of memory
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
    results = results[results["status"].isin(["ok", "oom", "infeasible"])]
    drawn = [m for m in metrics if results[m].notna().any()]
    key = [*_PANEL, _BLOCK] if _BLOCK in results else _PANEL
    lengths = results["prompt_len"].nunique() > 1 and not (
        results["workload"].nunique() > 1
        or results.duplicated([*key, "policy", "prompt_len"]).any()  # something else is swept
    )
    others = [name for name in swept_columns(results) if name not in (*key, "policy")]
    groups = list(results.groupby(key, sort=False))
    title = f"{what} against prompt length" if lengths else f"{what} by policy"
    models = ", ".join(results["model"].dropna().unique())
    shape = (len(drawn), len(groups))
    policies = list(results["policy"].unique())
    most = max(len(rows) for _, rows in groups)
    size = (4.3, 3.1) if lengths else (5.2, 0.9 + 0.24 * most)
    if len(groups) == 1 or (lengths and len(policies) > _FEW):
        size = (max(size[0], 6.0), size[1])  # room for the legend, and for more lines
    with style.panels(path, f"{title}, {models}", shape, size) as out:
        for column, (_, rows) in enumerate(groups):
            for row, metric in enumerate(drawn):
                axes = out.axes[row][column]
                if lengths:
                    _lines(axes, rows, metric, policies)
                    axes.set_ylabel(METRICS[metric] if column == 0 else "")
                else:
                    _bars(axes, rows, metric, policies, others)
            out.axes[0][column].set_title(_title(rows, results))
        style.legend_below(out.figure, _legend(results, policies, lengths))


def _title(rows: pd.DataFrame, results: pd.DataFrame) -> str:
    title = str(rows["hardware"].iloc[0])
    if results["model"].nunique() > 1:
        title = f"{rows['model'].iloc[0]} on {title}"
    if _BLOCK in results:
        n = int(rows[_BLOCK].iloc[0])
        as_set = rows[rows["n_batches"] == n]  # others merge or split their batches
        size = (rows if as_set.empty else as_set)["batch_size"].max()
        title += f", {n} {'batch' if n == 1 else 'batches'} of {size:g}"
    return title


def _lines(axes: Axes, rows: pd.DataFrame, metric: str, policies: list[str]) -> None:
    lost: list[tuple[float, str]] = []
    few = len(policies) <= _FEW
    for i, policy in enumerate(policies):
        over = len(policies) - 1 - i  # lines that coincide: dashes over solid, small over large
        line = rows[rows["policy"] == policy].sort_values("prompt_len")
        good = style.ok(line).dropna(subset=[metric])
        shade = style.colour(policy, policies)
        axes.plot(good["prompt_len"], good[metric], color=shade, ls=_dashes(i))
        for _, point in good.iterrows():
            marker = style.BOTTLENECKS.get(point["bottleneck"], ("o", ""))[0]
            size = (9.0 if marker == "*" else 5.5) + (1.5 if few else 0.6) * min(over, 4)
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
    if not (math.isfinite(low) and math.isfinite(high) and 0 < low < high):
        low, high = 0.1, 10.0  # nothing was drawn: every policy failed here
    pitch = min(0.07, _CROSSES / most)
    share = 0.02 + pitch * most  # of the height, kept free of lines
    axes.set_ylim(low * (low / high) ** (share / (1.0 - share)), high)
    for n, policy in lost:
        level = height.get(n, 0)
        height[n] = level + 1
        shade = style.colour(policy, policies)
        axes.plot(n, pitch * (level + 0.5), "x", color=shade, ms=8, mew=2.2,
                  transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip


def _dashes(i: int) -> str:
    """Line style of the i-th policy: one in three is dashed, so that lines that coincide show."""
    return "--" if i % 3 == 2 else "-"


def plain_log_axis(axes: Axes) -> None:
    """Tick labels of a logarithmic y axis as plain numbers, at least two of them."""
    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high / low > 4 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    ticks = [s * 10.0**e for e in range(-6, 8) for s in steps if low <= s * 10.0**e <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def _bars(
    axes: Axes, rows: pd.DataFrame, metric: str, policies: list[str], others: list[str]
) -> None:
    """A bar a run, first at the top, named by its policy and whatever else was varied."""
    names = []
    for i, (_, run) in enumerate(rows.iterrows()):
        varied = [f"{_words(name)} {run[name]}" for name in others]
        names.append(", ".join([str(run["policy"]), *varied]))
        if run["status"] != "ok" or pd.isna(run[metric]):
            axes.annotate(str(run["status"]), (0, i), xytext=(3, 0), textcoords="offset points",
                          va="center", fontsize=8)  # fmt: skip
            continue
        bar = axes.barh(i, run[metric], color=style.colour(run["policy"], policies), height=0.75)
        axes.bar_label(bar, labels=[significant(run[metric])], padding=2, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.set_xlabel(METRICS[metric])
    axes.grid(visible=False, axis="y")


def _words(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_len").replace("_", " ")


def _legend(results: pd.DataFrame, policies: list[str], lines: bool) -> list[Line2D]:
    if not lines:
        return [Line2D([], [], color=style.colour(p, policies), lw=6, label=p) for p in policies]
    handles = [
        Line2D([], [], color=style.colour(p, policies), ls=_dashes(i), label=p)
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
