"""Routing in a mixed fleet: the kappa thresholds against predicted finish, with and without a cap.

What readers get wrong: a cap on the machine that gets the high ratios is free only while its link
is the limit; dashed lines show where it is not.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments import style

_COLOURS = {"kappa-thresholds": "#D55E00", "shortest-finish": "#0072B2", "least-waiting": "#999999"}


def latency(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """p99 TTFT and energy per token against the request rate."""
    columns = ("ttft_p99_s", "energy_per_token_joules")
    style.require(results, "routing", "rate_per_s", *columns)
    rows = style.ok(results).copy()
    rows["capped"] = rows["hardware"].str.contains("@")  # gh200@300W
    title = f"{rows['model'].iloc[0]}, {rows['workload'].iloc[0]} on {rows['hardware'].iloc[0]}"
    with style.panels(path, title, (1, 2), (5.2, 3.2)) as out:
        for axes, column, words in zip(
            out.axes[0], columns, ("p99 TTFT, s", "energy, J per token"), strict=True
        ):
            for (routing, capped), part in rows.groupby(["routing", "capped"], sort=False):
                part = part.sort_values("rate_per_s")
                axes.plot(part["rate_per_s"], part[column], "o--" if capped else "o-",
                          color=_COLOURS.get(routing, "#000000"))  # fmt: skip
            axes.set_xlabel("requests/s")
            axes.set_ylabel(words)
            axes.set_xscale("log")
            if column == "ttft_p99_s":
                axes.set_yscale("log")
            rates = sorted(rows["rate_per_s"].unique())
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
        out.axes[0][1].set_ylim(bottom=0)
        first = out.axes[0][0]
        found = [name for name in _COLOURS if name in set(rows["routing"])]
        handles = [first.plot([], [], "o-", color=_COLOURS[n], label=n)[0] for n in found]
        if rows["capped"].any():
            handles.append(first.plot([], [], "k--", label="fast-link machine capped")[0])
        style.legend_below(out.figure, handles)
