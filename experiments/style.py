"""One look for all figures: fonts, colours that colour-blind readers can tell apart, panels.

A policy has the same colour in every figure. Colours are those of Okabe and Ito (2008), and others
that stay apart from them, and from each other, for readers without green receptors. Figures are
drawn without pyplot, so nothing is global and no display is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.load import CHOICES, OVERRIDE, SIZES

DPI = 150
POLICY_COLOURS = {
    "accelerate": "#D55E00",
    "accelerate-pinned": "#E8945A",
    "accelerate-big": "#8C3D00",
    "accelerate-big-pinned": "#B5784F",
    "flexgen": "#E69F00",
    "flexgen-pinned": "#56B4E9",
    "flexgen-cpu": "#F0E442",
    "tightllm": "#0072B2",
    "tightllm-no-distributor": "#CC79A7",
    "tightllm-no-loader": "#009E73",
    "tightllm-no-both": "#999999",
    "kvpr": "#00D078",
    "hybridserve": "#80E8E0",
    "zero-inference": "#5070F8",
    "zero-inference-cpu": "#2818E8",
    "cpu-attention": "#B02878",
    "cake": "#202098",
    "mixed": "#A80038",
}
_SETTINGS = (*CHOICES, *SIZES, "admission", "prefix", "routing")
_OTHER = ("#000000", "#6A3D9A", "#B15928", "#1B9E77", "#A6761D")
BOTTLENECKS = {  # category of the critical path: (marker, words)
    "h2d_weights": ("o", "weights over H2D"),
    "h2d_kv": ("s", "KV over H2D"),
    "d2h": ("^", "D2H"),
    "disk": ("D", "disk"),
    "compute": ("*", "GPU compute"),
    "host": ("P", "host copies or CPU"),
    "sync": ("X", "synchronisation"),
    "idle": (".", "idle"),
}
_COLUMN_INCHES, _CHARACTER_INCHES, _ROW_INCHES = 0.55, 0.065, 0.2  # of a legend
_RC: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 6.5,
    "hatch.linewidth": 0.6,
    "figure.titlesize": 12,
    "savefig.dpi": DPI,
}


@dataclass(frozen=True, slots=True)
class Panels:
    """A figure and its axes of shape (n_rows, n_columns)."""

    figure: Figure
    axes: list[list[Axes]]

    def each(self) -> Iterator[Axes]:
        """All axes."""
        for row in self.axes:
            yield from row


@contextmanager
def panels(
    path: Path,
    title: str,
    shape: tuple[int, int],
    size: tuple[float, float],
    sharex: bool | Literal["col"] = False,
    sharey: bool | Literal["row"] = False,
) -> Iterator[Panels]:
    """Axes to draw on, in inches a panel; saved to ``path`` at the end of the block."""
    with mpl.rc_context(_RC):
        rows, columns = shape
        figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)
        figure.suptitle(title, fontweight="bold")
        yield Panels(figure, [list(row) for row in axes])
        figure.savefig(path, dpi=DPI)


def legend_below(figure: Figure, handles: Sequence[Artist], n_columns: int = 4) -> None:
    """One legend for the whole figure, outside the axes, in as many columns as fit its width.

    The figure grows by what the legend has more than two rows.
    """
    longest = max(len(str(handle.get_label())) for handle in handles)
    fit = int(figure.get_figwidth() / (_COLUMN_INCHES + _CHARACTER_INCHES * longest))
    n = max(1, min(n_columns, len(handles), fit))
    more = max(0, -(-len(handles) // n) - 2)
    figure.set_figheight(figure.get_figheight() + _ROW_INCHES * more)
    figure.legend(handles=handles, loc="outside lower center", ncols=n)


def colour(policy: str, among: Sequence[str] = ()) -> str:
    """Fixed colour of a policy; others take the free colours in the order of ``among``."""
    if policy in POLICY_COLOURS:
        return POLICY_COLOURS[policy]
    others = [name for name in among if name not in POLICY_COLOURS]
    return _OTHER[others.index(policy) % len(_OTHER)] if policy in others else _OTHER[0]


def tokens(n: float) -> str:
    """A token count as on an axis: 512, 1K, 8K."""
    return f"{n / 1024:g}K" if n >= 1024 and n % 512 == 0 else f"{n:g}"


def ok(results: pd.DataFrame) -> pd.DataFrame:
    """Rows with a measurement."""
    return results[results["status"] == "ok"]


def single(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """``rows``, if no two have the same ``keys``; else ``ValueError`` naming what else varies."""
    for cell, runs in rows.groupby(list(keys), sort=False):
        if len(runs) > 1:
            told = [n for n in runs if n in _SETTINGS or str(n).startswith(OVERRIDE)]
            other = [str(n) for n in told if n not in keys and runs[n].nunique() > 1]
            where = ", ".join(f"{name} {value}" for name, value in zip(keys, cell, strict=True))
            what = f"they differ in {', '.join(other)}" if other else "they are alike"
            raise ValueError(f"results: {len(runs)} runs of {where}; {what}, keep one of each")
    return rows


def pivot(
    rows: pd.DataFrame, index: Sequence[str], columns: str, values: str, *, dropna: bool = True
) -> pd.DataFrame:
    """A row a combination of ``index``, in order of appearance, a column a value of ``columns``.

    A cell is one run; ``ValueError`` where there are several.
    """
    return single(rows, (*index, columns)).pivot_table(
        index=list(index), columns=columns, values=values, sort=False, dropna=dropna
    )


def machine_title(name: str, rows: pd.DataFrame) -> str:
    """A panel's machine and the batches that ran on it."""
    sizes = sorted(rows["batch_size"].dropna().unique())
    if not len(sizes):
        return name
    span = f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g}-{sizes[-1]:g}"
    blocks = sorted(rows["n_batches"].dropna().unique())
    return f"{name} ({'/'.join(f'{n:g}' for n in blocks)} batches of {span} sequences)"


def require(results: pd.DataFrame, *columns: str) -> None:
    """``ValueError`` unless the results have these columns and a row that ran."""
    missing = [name for name in columns if name not in results]
    if missing:
        raise ValueError(f"results: lack the columns {', '.join(missing)}")
    if ok(results).empty:
        raise ValueError("results: no run has status ok, there is nothing to draw")
