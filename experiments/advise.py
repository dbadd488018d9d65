"""An advice as a figure: the best of each policy, and what more of each resource would gain.

Left, values with the range that the profile's uncertainty leaves (80 % of drawn machines); right,
elasticities of the best. What readers get wrong: overlapping ranges do not mean that the order is
open. All policies meet the same machines, and the share of them on which each is best is written
beside its bar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from experiments import style

ADVICE = "advice.json"
UNITS = {
    "decode_tokens_per_s": "decode tokens/s",
    "prefill_tokens_per_s": "prefill tokens/s",
    "requests_per_s": "requests/s",
}
RESOURCES = {
    "link": "host link rates",
    "compute": "GPU FLOP/s",
    "hbm": "GPU memory rate",
    "host_cpu": "CPU, host copies",
    "disk": "disk rates",
    "gpu_memory": "GPU memory",
    "host_memory": "host memory",
}


def advices(results: pd.DataFrame, folder: Path) -> list[dict[str, Any]]:
    """Answers of the runs that have one; ``ValueError`` if none has."""
    found = []
    for run in results["run"]:
        path = folder / str(run) / ADVICE
        if path.is_file():
            advice = json.loads(path.read_text(encoding="utf-8"))
            if advice["ranking"]:
                found.append(advice)
    if not found:
        raise ValueError(f"results: no run has an answer ({ADVICE}), there is nothing to draw")
    return found


def answer(results: pd.DataFrame, folder: Path, path: Path) -> None:
    """A row of two panels per answer."""
    style.require(results, "run")
    found = advices(results, folder)
    title = "Best of each policy, and what more of a resource gains"
    with style.panels(path, title, (len(found), 2), (5.4, 3.0)) as out:
        for advice, (left, right) in zip(found, out.axes, strict=True):
            _ranking(left, advice)
            _elasticity(right, advice["elasticity"], float(advice["change"]))


def _ranking(axes: Axes, advice: Mapping[str, Any]) -> None:
    ranking = list(reversed(advice["ranking"]))
    names = [row["policy"] for row in ranking]
    at = list(range(len(ranking)))
    values = [row["value"] for row in ranking]
    axes.barh(at, values, color=[style.colour(name, names) for name in names])
    for y, row in zip(at, ranking, strict=True):
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [y, y], color="#333333", linewidth=1.2)
        right = max(row["value"], row["high"] or 0.0)
        share = "" if row["wins"] is None else f", best in {100 * row['wins']:.0f} %"
        axes.text(right, y, f"  {row['value']:.3g}{share}", va="center", fontsize=7.5)
    axes.set_xlim(0, 1.45 * max(max(v, row["high"] or 0.0)
                                for v, row in zip(values, ranking, strict=True)))  # fmt: skip
    axes.set_yticks(at, [f"{row['policy']}\n{_setting(row['overrides'])}" for row in ranking],
                    fontsize=7)  # fmt: skip
    axes.set_xlabel(UNITS[advice["objective"]])
    axes.set_title(f"{advice['model']} on {advice['hardware']}, {advice['workload']}")
    axes.grid(visible=False, axis="y")


def _setting(overrides: str) -> str:
    """Batches times sequences and what else was chosen, short enough for an axis."""
    held = dict(text.split("=", 1) for text in overrides.split())
    parts = [f"{held['workload.n_batches']} x {held['workload.batch_size']}"]
    if "policy.percent" in held:
        shares = held["policy.percent"].strip("[]").split(",")
        parts.append("/".join(f"{float(share):.0f}" for share in shares))
    parts += [held["policy.placement"]] if "policy.placement" in held else []
    parts += [f"{held['policy.n_slices']} slices"] if "policy.n_slices" in held else []
    return ", ".join(parts)


def _elasticity(axes: Axes, rows: Sequence[Mapping[str, Any]], change: float) -> None:
    ordered = sorted(rows, key=lambda row: row["elasticity"])
    at = list(range(len(ordered)))
    values = [row["elasticity"] for row in ordered]
    bars = axes.barh(at, values, color="#0072B2")
    labels = [f"{v + 0.0:.2f}{' *' if row['moves'] else ''}"
              for v, row in zip(values, ordered, strict=True)]  # fmt: skip
    axes.bar_label(bars, labels=labels, fontsize=7.5, padding=2)
    axes.set_yticks(at, [RESOURCES.get(row["resource"], row["resource"]) for row in ordered])
    axes.set_xlim(min(0.0, *values) - 0.05, max(1.0, *values) * 1.15)
    note = " (* another setting is best then)" if any(row["moves"] for row in ordered) else ""
    axes.set_xlabel(f"elasticity at {100 * change:.0f} % more{note}")
    axes.grid(visible=False, axis="y")
