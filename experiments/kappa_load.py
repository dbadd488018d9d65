"""Tables 4 and 5 of the kappa paper beside ours: new tokens an iteration, and watts.

What readers get wrong: nothing here is fitted except the KV capacity, which the paper does not
give. Printed values are drawn as lines, ours as bars, where the register says that they need not
agree too.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments import style
from policies.cost.kappa_paper import TABLE_4, TABLE_5


def tables(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """Left: scheduled tokens; right: mean and maximum power of a GPU."""
    columns = ("scheduled_tokens_mean", "power_mean_watts", "power_max_watts")
    style.require(results, "workload", "rate_per_s", *columns)
    rows = style.ok(results).reset_index(drop=True)
    labels = [f"{w}\n{r:g}/s" for w, r in zip(rows["workload"], rows["rate_per_s"], strict=True)]
    cells = [(w.split("_")[0], int(r)) for w, r in zip(rows["workload"], rows["rate_per_s"],
                                                      strict=True)]  # fmt: skip
    title = f"{rows['model'].iloc[0]} on {rows['hardware'].iloc[0]}, prefill only"
    with style.panels(path, title, (1, 2), (5.2, 3.2)) as out:
        left, right = out.axes[0]
        places = range(len(rows))
        ours = left.bar(places, rows["scheduled_tokens_mean"], color="#0072B2", width=0.6)
        left.bar_label(ours, fmt="%.0f", fontsize=8)
        left.set_ylabel("new tokens an iteration")
        right.bar(places, rows["power_max_watts"], color="#BBD7EA", width=0.6)
        right.bar(places, rows["power_mean_watts"], color="#0072B2", width=0.6)
        right.set_ylabel("W of one GPU (mean, maximum)")
        for place, cell in zip(places, cells, strict=True):
            if cell in TABLE_4:
                left.plot([place - 0.4, place + 0.4], [TABLE_4[cell]] * 2, color="#D55E00")
            for watts in TABLE_5.get(cell, ()):
                right.plot([place - 0.4, place + 0.4], [watts] * 2, color="#D55E00")
        for axes in (left, right):
            axes.set_xticks(list(places), labels)
            axes.grid(visible=False, axis="x")
        handle = left.plot([], [], color="#D55E00", label="printed")[0]
        style.legend_below(out.figure, [handle])
