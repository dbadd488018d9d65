"""Speed-up of TightLLM over each other policy, by model, machine and prompt length.

Each policy runs with the largest batches that its own memory use allows (``batch_size=auto``), so
throughputs are compared, not times. Above the line TightLLM is faster.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments import style
from experiments.throughput import METRICS, plain_log_axis

FULL = "tightllm"
PUBLISHED = {"decode_tokens_per_s": (1.3, 23.0), "prefill_tokens_per_s": (1.2, 22.0)}
_HATCHES = ("", "//////", "......", "xxxx")


def speedups(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """TightLLM's throughput over each other policy's; NaN where one of them did not run.

    Rows (hardware, model, prompt_len), a column a policy.
    """
    kept = results[results["status"].isin(["ok", "oom"])]
    keys = ("hardware", "model", "prompt_len")
    table = style.pivot(kept, keys, "policy", metric, dropna=False).dropna(how="all")
    if FULL not in table:
        raise ValueError(f"results: no run of policy {FULL} to compare with")
    baselines = [name for name in results["policy"].unique() if name != FULL and name in table]
    return table[baselines].rdiv(table[FULL], axis=0)


def speedup(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """A row a machine; decode left, prefill right; a colour a policy, a hatch a length."""
    style.require(results, "policy", "model", "hardware", "prompt_len", *METRICS)
    machines = list(results["hardware"].unique())
    lengths = sorted(results["prompt_len"].dropna().unique())
    title = "Speed-up of TightLLM over each other policy, each with its own largest batches"
    width = max(6.3, 0.9 * results["policy"].nunique())
    with style.panels(path, title, (len(machines), 2), (width, 3.0), sharey=True) as out:
        for column, (metric, words) in enumerate(METRICS.items()):
            table = speedups(results, metric)
            for row, machine in enumerate(machines):
                axes = out.axes[row][column]
                _bars(axes, table.loc[machine], lengths)
                low, high = PUBLISHED[metric]
                axes.axhspan(low, high, color="#0072B2", alpha=0.07, lw=0)
                axes.set_title(f"{words.split()[0]} on {machine}")
                if column == 0:
                    axes.set_ylabel("speed-up (times)")
        plain_log_axis(out.axes[0][0])
        handles = [Patch(facecolor=style.colour(str(n)), label=f"over {n}") for n in table]
        handles += [
            Patch(facecolor="#FFFFFF", edgecolor="#555555", hatch=_HATCHES[i % len(_HATCHES)],
                  label=f"prompt {style.tokens(n)}")
            for i, n in enumerate(lengths)
        ]  # fmt: skip
        handles.append(Patch(facecolor="#0072B2", alpha=0.12, label="range in the paper"))
        style.legend_below(out.figure, handles, n_columns=len(handles))


def _bars(axes: Axes, table: pd.DataFrame, lengths: list[float]) -> None:
    models = list(dict.fromkeys(table.index.get_level_values("model")))
    baselines = list(table.columns)
    n = len(baselines) * len(lengths)
    width = 0.84 / n
    for i, (baseline, length) in enumerate((b, s) for b in baselines for s in lengths):
        hatch = _HATCHES[lengths.index(length) % len(_HATCHES)]
        for at, model in enumerate(models):
            x = at + (i - (n - 1) / 2) * width
            if (model, length) not in table.index:
                continue
            value = table.loc[(model, length), baseline]
            if pd.isna(value):
                axes.annotate("OOM", (x, 1.0), xytext=(0, 3), textcoords="offset points",
                              rotation=90, fontsize=6.5, ha="center", va="bottom",
                              color=style.colour(baseline))  # fmt: skip
                continue
            axes.bar(x, value - 1.0, width, bottom=1.0, color=style.colour(baseline), hatch=hatch,
                     edgecolor="#FFFFFF", lw=0.3)  # fmt: skip
    axes.axhline(1.0, color="#333333", lw=0.9)
    axes.set_yscale("log")
    axes.set_xticks(range(len(models)), models)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.grid(visible=False, axis="x")
