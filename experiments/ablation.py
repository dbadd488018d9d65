"""TightLLM without its components: what the KV distributor and the weight loader are worth.

A loss is what throughput drops by when a component is switched off. What readers get wrong: losses
do not add up. Where transfers bind everywhere, slicing weights moves the same bytes and gains
nothing by itself, and the figure says so.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments import style
from experiments.throughput import METRICS

FULL = "tightllm"
WITHOUT = {
    "tightllm-no-distributor": "without KV distributor",
    "tightllm-no-loader": "without weight loader",
    "tightllm-no-both": "without both",
}
# Ranges that the paper reports over all its cells, as shares; prefill gives only the largest.
PUBLISHED = {
    ("decode_tokens_per_s", "tightllm-no-distributor"): (0.126, 0.431),
    ("decode_tokens_per_s", "tightllm-no-loader"): (0.044, 0.748),
    ("prefill_tokens_per_s", "tightllm-no-distributor"): (0.0, 0.466),
    ("prefill_tokens_per_s", "tightllm-no-loader"): (0.0, 0.382),
}


def losses(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Share of throughput lost by each variant: rows (hardware, prompt_len), a column a variant."""
    table = style.pivot(style.ok(results), ("hardware", "prompt_len"), "policy", metric)
    if FULL not in table:
        raise ValueError(f"results: no run of policy {FULL} to compare with")
    found = [name for name in WITHOUT if name in table]
    return 1.0 - table[found].div(table[FULL], axis=0)


def throughput(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Tokens per second of the four variants."""
    style.require(results, "policy", "hardware", "prompt_len", *METRICS)
    variants = [name for name in (*reversed(WITHOUT), FULL) if name in set(results["policy"])]
    machines = list(results["hardware"].unique())
    title = f"TightLLM and its ablations, {results['model'].iloc[0]}"
    with style.panels(path, title, (2, len(machines)), (4.6, 2.7)) as out:
        for column, machine in enumerate(machines):
            rows = results[results["hardware"] == machine]
            for row, (metric, words) in enumerate(METRICS.items()):
                axes = out.axes[row][column]
                table = style.pivot(style.ok(rows), ("prompt_len",), "policy", metric).sort_index()
                _grouped(axes, table, variants)
                axes.set_ylabel(words if column == 0 else "")
            out.axes[0][column].set_title(style.machine_title(machine, rows))
        style.legend_below(out.figure, [_patch(name) for name in variants])


def loss(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Per cent lost without each component, over the ranges that the paper reports."""
    style.require(results, "policy", "hardware", "prompt_len", *METRICS)
    machines = list(results["hardware"].unique())
    title = f"Loss without each component, {results['model'].iloc[0]}"
    with style.panels(path, title, (2, len(machines)), (4.6, 2.7), sharey="row") as out:
        for row, (metric, words) in enumerate(METRICS.items()):
            table = 100.0 * losses(results, metric)
            for column, machine in enumerate(machines):
                axes = out.axes[row][column]
                if machine in table.index.get_level_values("hardware"):
                    part = table.loc[machine].sort_index()
                    _grouped(axes, part, list(part.columns), labels=True)
                    _published(axes, metric, len(part), list(part.columns))
                axes.axhline(0.0, color="#333333", lw=0.8)
                axes.set_ylim(bottom=min(-4.0, axes.get_ylim()[0]))
                axes.set_ylabel(f"{words.split()[0]} loss (%)" if column == 0 else "")
                if row == 0:
                    rows = results[results["hardware"] == machine]
                    axes.set_title(style.machine_title(machine, rows))
        handles = [_patch(name) for name in WITHOUT]
        handles.append(Patch(facecolor="#FFFFFF", edgecolor="#555555", hatch="////",
                             label="range in the paper, all its cells"))  # fmt: skip
        style.legend_below(out.figure, handles)


def _patch(name: str) -> Patch:
    return Patch(facecolor=style.colour(name), label=WITHOUT.get(name, "TightLLM"))


def _published(axes: Axes, metric: str, at: int, names: list[str]) -> None:
    """The paper's ranges as bars of their own, right of the simulated lengths."""
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        if (metric, name) in PUBLISHED:
            low, high = PUBLISHED[metric, name]
            x = at + (i - (len(names) - 1) / 2) * width
            axes.bar(x, 100 * (high - low), width, bottom=100 * low, facecolor="#FFFFFF",
                     edgecolor=style.colour(name), hatch="////")  # fmt: skip
    axes.set_xticks([*axes.get_xticks(), at], [*_tick_texts(axes), "paper"])


def _tick_texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_xticklabels()]


def _grouped(axes: Axes, table: pd.DataFrame, names: list[str], labels: bool = False) -> None:
    """Bars of each prompt length side by side, a colour a variant."""
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        if name not in table:
            continue
        at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(table))]
        bars = axes.bar(at, table[name], width, color=style.colour(name, names))
        if labels:
            texts = [f"{round(v, 1) + 0.0:.1f}" for v in table[name]]  # never -0.0
            axes.bar_label(bars, labels=texts, fontsize=6.5, padding=1)
    axes.set_xticks(range(len(table)), [style.tokens(n) for n in table.index])
    axes.set_xlabel("prompt length (tokens)")
    axes.grid(visible=False, axis="x")
