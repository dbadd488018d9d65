"""One GPU behind six links: what a faster link buys until the GPU itself is the limit.

What readers get wrong: the paper compares links on different GPUs; here only the link changes. The
gain ends at the workload's K/T divided by kappa_crit, wherever the link's peak is.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments import style

RATE = "override.hardware.h2d.bytes_per_s"
LINKS = {  # bytes per second of one GPU's link
    32e9: "PCIe 4",
    64e9: "PCIe 5",
    150e9: "C2C\nmeasured",
    450e9: "C2C\nphysical",
    900e9: "C2C\nas printed",
    8e12: "unified\nHBM",
}
N_GPUS = 8
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def throughput(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Requests per second and the share of GPU time, a line a model and workload."""
    style.require(results, "model", "workload", "requests_per_s", "gpu_busy", RATE)
    rows = style.ok(results).copy()
    rows["rate"] = rows[RATE].astype(float) / N_GPUS
    cases = list(rows.groupby(["model", "workload"], sort=False))
    title = f"Backlogged, prefill only, {rows['hardware'].iloc[0]} with other links"
    with style.panels(path, title, (1, 2), (5.2, 3.3)) as out:
        left, right = out.axes[0]
        for ((model, workload), part), colour in zip(cases, _COLOURS, strict=False):
            part = part.sort_values("rate")
            places = [list(LINKS).index(rate) for rate in part["rate"]]
            gain = part["requests_per_s"] / part["requests_per_s"].iloc[0]
            left.plot(places, gain, "o-", color=colour, label=f"{model}, {workload}")
            right.plot(places, part["gpu_busy"], "o-", color=colour)
        left.set_ylabel(f"throughput over {LINKS[32e9]}")
        left.set_yscale("log")
        right.set_ylabel("share of time that the GPU computes")
        right.set_ylim(0, 1.03)
        for axes in (left, right):
            axes.set_xticks(range(len(LINKS)), list(LINKS.values()), fontsize=8)
        left.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        style.legend_below(out.figure, left.get_legend_handles_labels()[0], n_columns=2)
