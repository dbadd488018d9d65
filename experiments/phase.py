"""Phase diagram: which sources of a cached token are worth using, for any machine and context.

A machine is one number here, link bytes per FLOP: at constant rates nothing else of it matters, so
one diagram holds all link and compute rates. What readers get wrong: a region says which sources
the best mix has, not that it gains anything; where it gains less than 1 % it is faded. Machines are
dots with their reads of GPU memory counted, so a dot may have another colour than its ground.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke

from experiments import style
from policies.cost.breakeven import WORTHWHILE_GAIN
from policies.cost.layer_work import LayerWork

REGIONS = {  # colour, words
    "recompute": ("#CC79A7", "recompute all (weights are the limit)"),
    "kv+recompute": ("#E69F00", "load KV + recompute"),
    "input+recompute": ("#0072B2", "load layer inputs + recompute"),
    "kv+input": ("#56B4E9", "load KV + layer inputs"),
    "kv": ("#BBBBBB", "load all KV (GPU is the limit)"),
    "input": ("#FFFFFF", "load layer inputs alone"),
    "none": ("#000000", "nothing cached"),
}
_WITHOUT_AREA = ("input", "none")  # only a dot can have them: one is a line, one needs no tokens
RATIOS = (1.2e-6, 1.2e-2)  # link bytes per FLOP
CONTEXTS = (128, 131072)
TABLE_CONTEXTS = (512, 2048, 8192, 32768)
GAINS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_KEYS = ("model", "weights", "n_batches")
_WORK = tuple(name for name in LayerWork.__slots__ if name not in ("n_ctx", "n_seqs"))
_N_RATIOS, _N_CONTEXTS = 140, 61


def boundaries(results: pd.DataFrame, folder: Path) -> pd.DataFrame:  # noqa: ARG001
    """Where the best mix changes, in link bytes per FLOP, by model, block and context."""
    rows = []
    for name, part in _panels(results):
        for n_ctx in TABLE_CONTEXTS:
            edges = _work(part, n_ctx).boundaries()
            rows.append({
                **dict(zip(_KEYS, name, strict=True)), "n_ctx": n_ctx,
                "recompute_all_below": edges.recompute, "inputs_at": edges.input,
                "load_all_above": edges.load_all,
            })  # fmt: skip
    return pd.DataFrame(rows)


def diagram(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """A column a model, a row a block: regions, lines of equal gain, machines as dots."""
    panels = dict(_panels(results))
    models = list(dict.fromkeys(name[0] for name in panels))
    blocks = list(dict.fromkeys(name[1:] for name in panels))
    title = "Best source of cached tokens in decode, and its speed-up over loading all KV"
    shape = (len(blocks), len(models))
    with style.panels(path, title, shape, (4.3, 2.75), sharex=True, sharey=True) as out:
        for axes_of_row, block in zip(out.axes, blocks, strict=True):
            for axes, model in zip(axes_of_row, models, strict=True):
                part = panels[(model, *block)]
                _regions(axes, part)
                _gains(axes, part)
                _machines(axes, part)
            _side(axes_of_row, block, panels[(models[0], *block)])
        for axes, model in zip(out.axes[0], models, strict=True):
            machines = panels[(model, *blocks[0])]
            _names(axes, machines)
            axes.set_title(_title(machines), pad=88)
        for axes in out.axes[-1]:
            axes.set_xlabel("link over compute rate, bytes per million FLOP")
        style.legend_below(out.figure, _legend(results), n_columns=3)


def _panels(results: pd.DataFrame) -> Iterator[tuple[tuple[str, str, int], pd.DataFrame]]:
    """Rows by model, weights and number of batches, which resident weights do not depend on."""
    style.require(results, *_KEYS, "batch_size", "hardware", "region", *_WORK)
    rows = style.ok(results)
    resident = rows["weights"] == "resident"
    first = rows.loc[resident, "n_batches"].min()
    rows = rows[~resident | (rows["n_batches"] == first)]
    order = rows.sort_values(["weights", "n_batches"], ascending=[False, True], kind="stable")
    for name, part in order.groupby(list(_KEYS), sort=False):
        if part["batch_size"].nunique() > 1:
            raise ValueError(f"results: {name} has several batch sizes, the diagram needs one")
        model, weights, n_batches = name
        yield (str(model), str(weights), int(n_batches)), part


def _work(part: pd.DataFrame, n_ctx: int) -> LayerWork:
    """Constants of a panel, which are the same in all its rows, at another context."""
    row: Mapping[str, Any] = part.iloc[0].to_dict()
    n_seqs = int(row["n_batches"] * row["batch_size"])
    return LayerWork(**{name: float(row[name]) for name in _WORK}, n_ctx=n_ctx, n_seqs=n_seqs)


# ---- one panel -----------------------------------------------------------------------------------


def _regions(axes: Axes, part: pd.DataFrame) -> None:
    """Regions between the closed form's boundaries."""
    contexts = np.geomspace(*CONTEXTS, 4 * _N_CONTEXTS)
    work = _work(part, CONTEXTS[0])
    edges = [replace(work, n_ctx=round(n)).boundaries() for n in contexts]
    pays = np.array([edge.input is not None for edge in edges])
    low, high = (np.clip([getattr(edge, name) for edge in edges], *RATIOS)
                 for name in ("recompute", "load_all"))  # fmt: skip
    middle = np.clip([edge.input or RATIOS[0] for edge in edges], *RATIOS)
    left, right = np.full_like(low, RATIOS[0]), np.full_like(low, RATIOS[1])
    spans = {
        "recompute": (left, low, low > left),
        "kv+recompute": (low, high, ~pays),
        "input+recompute": (low, middle, pays),
        "kv+input": (middle, high, pays),
        "kv": (high, right, high < right),
    }
    for region, (start, stop, where) in spans.items():
        axes.fill_betweenx(contexts, 1e6 * start, 1e6 * stop, where=where, lw=0, alpha=0.55,
                           color=REGIONS[region][0])  # fmt: skip
    for edge, where in ((low, low > left), (middle, pays), (high, high < right)):
        if where.any():
            axes.plot(1e6 * np.where(where, edge, np.nan), contexts, color="white", lw=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_xlim(*(1e6 * r for r in RATIOS))
    axes.set_ylim(*CONTEXTS)
    axes.set_yticks([2**i for i in range(7, 18, 2)])
    axes.yaxis.set_major_formatter(lambda n, _: style.tokens(n))
    axes.grid(visible=False)


def _gains(axes: Axes, part: pd.DataFrame) -> None:
    """Lines of equal speed-up, and a veil where there is next to none."""
    ratios = np.geomspace(*RATIOS, _N_RATIOS)
    contexts = np.geomspace(*CONTEXTS, _N_CONTEXTS)
    work = _work(part, CONTEXTS[0])
    gains = np.array([
        [of_context.mix(ratio, 1.0).gain_over_load_all for ratio in ratios]
        for of_context in (replace(work, n_ctx=round(n)) for n in contexts)
    ])  # fmt: skip
    axes.contourf(1e6 * ratios, contexts, gains, levels=[0.0, WORTHWHILE_GAIN], colors="white",
                  alpha=0.62)  # fmt: skip
    lines = axes.contour(1e6 * ratios, contexts, gains, levels=GAINS, colors="#222222",
                         linewidths=0.8)  # fmt: skip
    axes.clabel(lines, fmt=lambda v: f"{v:g}x", fontsize=8)


def _machines(axes: Axes, part: pd.DataFrame) -> None:
    """A line a machine and a dot in the colour of its own best mix."""
    for row in part.to_dict("records"):
        at = 1e6 * row["bytes_per_s"] / row["flops_per_s"]
        axes.axvline(at, color="#444444", lw=0.5, ls=":")
        axes.plot([at], [row["prompt_len"]], "o", ms=6, mec="black", mew=0.9, zorder=5,
                  color=REGIONS[row["region"]][0])  # fmt: skip


def _names(axes: Axes, part: pd.DataFrame) -> None:
    """Names of the machines above a panel, moved apart, each joined to its line."""
    rows = part.assign(at=1e6 * part["bytes_per_s"] / part["flops_per_s"]).sort_values("at")
    low, high = (np.log10(1e6 * r) for r in RATIOS)
    exact = (np.log10(rows["at"].to_numpy()) - low) / (high - low)
    for name, at, place in zip(rows["hardware"], exact, _apart(exact, 0.042), strict=True):
        axes.annotate(
            name, xy=(at, 1.0), xytext=(place, 1.1), xycoords="axes fraction", rotation=90,
            fontsize=7.5, ha="center", va="bottom",
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#444444", "shrinkA": 0,
                        "shrinkB": 0, "relpos": (0.5, 0.0)},
        )  # fmt: skip


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Increasing ``places`` in [0, 1] moved as little as needs be to lie ``gap`` apart."""
    groups: list[list[float]] = []  # neighbours that touch, spread evenly around their mean
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _span(groups[-2], gap)[1] + gap > _span(groups[-1], gap)[0]:
            last = groups.pop()
            groups[-1] += last
    return [_span(group, gap)[0] + i * gap for group in groups for i in range(len(group))]


def _span(group: Sequence[float], gap: float) -> tuple[float, float]:
    """First and last place of a group, within [0, 1]."""
    width = gap * (len(group) - 1)
    first = min(max(sum(group) / len(group) - width / 2, 0.0), 1.0 - width)
    return first, first + width


# ---- words ---------------------------------------------------------------------------------------


def _title(part: pd.DataFrame) -> str:
    row = part.iloc[0]
    ratio = row["input_bytes"] / row["kv_bytes"]
    return f"{row['model']}: layer input {ratio:.3g} x KV bytes"


def _side(row: Sequence[Axes], block: tuple[str, int], part: pd.DataFrame) -> None:
    """Labels of a row of panels."""
    weights, n_batches = block
    size = part["batch_size"].iloc[0]
    words = (
        f"weights resident\nbatches of {size:g}"
        if weights == "resident"
        else f"weights over the link\n{n_batches} x {size:g} sequences"
    )
    row[0].set_ylabel(f"{words}\ncached tokens")


def _legend(results: pd.DataFrame) -> list[Any]:
    handles: list[Any] = [
        Patch(facecolor=colour, alpha=0.55, label=words)
        for region, (colour, words) in REGIONS.items()
        if region not in _WITHOUT_AREA
    ]
    veiled = Patch(facecolor=REGIONS["kv+recompute"][0], alpha=0.18, edgecolor="#AAAAAA",
                   label="pale: gains under 1 %")  # fmt: skip
    tokens = style.tokens(style.ok(results)["prompt_len"].iloc[0])
    dot = Line2D([], [], marker="o", ls="", color="white", mec="black",
                 label=f"machine at {tokens} tokens, GPU memory reads counted")  # fmt: skip
    line = Line2D([], [], color="#222222", lw=0.8, label="speed-up over loading all KV")
    rim = Stroke(linewidth=5, foreground=REGIONS["kv+input"][0])
    both = Line2D([], [], color="white", lw=1.2, path_effects=[rim, Normal()],
                  label="between the blues: layer inputs alone")  # fmt: skip
    return [*handles, both, veiled, dot, line]
