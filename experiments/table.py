"""The comparison table of a sweep: what was varied, and what came out.

Columns that say the same in every row are not printed: the caption names them once. What does not
fit into memory reads ``oom gpu: need 91.2 GB, have 24.7 GB`` instead of empty cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.load import CHOICES, OVERRIDE, SIZES

_REASON = 40  # characters of a failure's reason; results.csv has all of it
_SERVING = ("admission", "prefix", "routing")
_PHASE = ("weights",)
_KEYS = (*CHOICES, *SIZES, *_SERVING, *_PHASE)


def significant(value: float) -> str:
    """Three significant digits without an exponent."""
    if value == 0 or not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    digits = max(0, 2 - int(f"{abs(value):.2e}".partition("e")[2]))
    return f"{value:,.{digits}f}"


def _bottleneck(value: Any) -> str:
    return str(value).replace("h2d_", "H2D ").replace(" kv", " KV")


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    title: str
    show: Callable[[Any], str]
    rank: int = 0  # of the columns that do not fit, the highest ranks are left out first
    zero: bool = True  # whether a column of zeros says something


_MEASURES = (
    _Column("prefill_tokens_per_s", "prefill\ntok/s", significant),
    _Column("decode_tokens_per_s", "decode\ntok/s", significant),
    _Column("ttft_s", "TTFT\ns", significant, rank=3),
    _Column("tpot_s", "TPOT\ns", significant, rank=4),
    _Column("bottleneck", "waits\nmost on", _bottleneck, rank=1),
    _Column("bound_ratio", "x lower\nbound", lambda v: f"{v:.2f}", rank=5),
    _Column("n_recompute_mean", "mean\nN_r", lambda v: f"{v:.0f}", rank=2),
    _Column("n_project_mean", "mean\nproj.", lambda v: f"{v:.0f}", rank=5, zero=False),
    _Column("n_cpu_mean", "mean\nCPU", lambda v: f"{v:.0f}", rank=6, zero=False),
    _Column("solve_s", "solve\nms", lambda v: f"{1e3 * v:.0f}", rank=6),
    _Column("makespan_s", "makespan\ns", significant, rank=7),
    # serving
    _Column("scheduled_tokens_mean", "new tok\n/iter", significant),
    _Column("ttft_mean_s", "TTFT\nmean s", significant, rank=3),
    _Column("ttft_p99_s", "TTFT\np99 s", significant),
    _Column("tpot_mean_s", "TPOT\nmean s", significant, rank=4),
    _Column("requests_per_s", "req/s", significant),
    _Column("transfer_overhead", "POH", significant, rank=2),
    _Column("power_mean_watts", "W\n/GPU", lambda v: f"{v:.0f}", rank=5),
    # the kappa analysis
    _Column("kappa_crit", "kappa_crit\nformula", significant),
    _Column("kappa_crit_simulated", "simu-\nlated", significant),
    _Column("kappa_crit_peak", "peak\nFP16", significant, rank=2),
    _Column("kappa_crit_paper", "paper", significant),
    _Column("recompute_gain_bound", "recompute\ngains <=", lambda v: f"{v:.1%}", rank=3),
    # the best mix of three sources
    _Column("region", "best mix", str),
    _Column("share_kv", "KV", lambda v: f"{v:.1%}", rank=2),
    _Column("share_input", "inputs", lambda v: f"{v:.1%}", rank=2),
    _Column("share_recompute", "recom-\npute", lambda v: f"{v:.1%}", rank=2),
    _Column("gain_over_load_all", "x load\nall", lambda v: f"{v:.3f}"),
    _Column("gain_over_two_sources", "x load or\nrecompute", lambda v: f"{v:.3f}", rank=1),
    _Column("limit", "limit", str, rank=3),
)


def swept_columns(results: pd.DataFrame) -> list[str]:
    """Columns that describe a run and differ between rows.

    ``n_batches`` counts only as far as it was set: Accelerate has one batch a block whatever the
    workload says, which is the policy's doing.
    """
    own = [str(name) for name in results if str(name).startswith(OVERRIDE)]
    own = [name for name in own if _short(name) not in results or _short(name) == "n_batches"]
    names = [name for name in [*_KEYS, *own] if name in results and name != "n_batches"]
    varied = [name for name in names if results[name].nunique() > 1]
    # An override that only names the policy or the machine in other words says nothing new.
    keys = [key for key in ("policy", "hardware") if key in results]
    return [n for n in varied if n not in own or not any(_same(results, n, key) for key in keys)]


def _same(results: pd.DataFrame, name: str, key: str) -> bool:
    """Whether two columns tell rows apart in the same way."""
    pairs = len(results[[name, key]].drop_duplicates())
    return pairs == results[key].nunique() == results[name].nunique()


def status_text(row: pd.Series) -> str:
    """A row's status in words."""
    if row["status"] == "oom" and pd.notna(row.get("need_bytes")):
        need, have = _gigabytes(row["need_bytes"]), _gigabytes(row["have_bytes"])
        return f"oom {row['oom_tier']}: need {need}, have {have}"
    if row["status"] != "ok":
        reason = str(row.get("reason", ""))
        short = reason if len(reason) <= _REASON else f"{reason[: _REASON - 3]}..."
        return f"{row['status']}: {short}"
    return "ok"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{significant(nbytes / 1e9)} GB"


def comparison(results: pd.DataFrame, title: str, width: int, always: Sequence[str] = ()) -> Table:
    """A rich table of a sweep for a terminal of ``width`` characters.

    Measures that do not fit beside what was swept are left out, except those named in ``always``;
    ``results.csv`` has them all. ``ValueError`` for a name in ``always`` that is no measure.
    """
    unknown = set(always) - {column.name for column in _MEASURES}
    if unknown:
        known = ", ".join(column.name for column in _MEASURES)
        raise ValueError(f"columns: {', '.join(sorted(unknown))} must be among {known}")
    # A mode's runs have none of the other modes' measures.
    measures = [c for c in _MEASURES if c.name in results and results[c.name].notna().any()]
    measures = [c for c in measures if c.zero or results[c.name].any()]
    measures = [replace(c, rank=0) if c.name in always else c for c in measures]
    console = Console(width=10 * width)
    while True:
        table = _table(results, title, measures)
        needed = table.__rich_measure__(console, console.options).maximum
        least = max((column.rank for column in measures), default=0)
        if needed <= width or not least:
            return table
        measures = [column for column in measures if column.rank != least]


def listing(frame: pd.DataFrame, title: str, width: int) -> Table:
    """A rich table of every cell of ``frame``; numbers with a fraction to five digits.

    Columns stand closer where they would not fit a terminal of ``width`` characters.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name in frame:
        right = pd.api.types.is_numeric_dtype(frame[name])
        table.add_column(str(name).replace("_", "\n"), justify="right" if right else "left")
    for row in frame.itertuples(index=False):
        table.add_row(*(f"{v:,.5g}" if isinstance(v, float) and pd.notna(v) else _cell(v)
                        for v in row))  # fmt: skip
    console = Console(width=10 * width)
    if table.__rich_measure__(console, console.options).maximum > width:
        table.padding = (0, 0, 0, 0)
    return table


def _table(results: pd.DataFrame, title: str, measures: list[_Column]) -> Table:
    swept = swept_columns(results)
    table = Table(title=title, caption=_caption(results, swept), box=box.SIMPLE_HEAD,
                  title_justify="left", caption_justify="left", padding=(0, 1, 0, 0))  # fmt: skip
    for name in swept:
        heading = _short(name).replace("_", "\n")
        table.add_column(heading, justify="left" if name in CHOICES else "right", no_wrap=True)
    for column in measures:
        text = column.name == "bottleneck"
        table.add_column(column.title, justify="left" if text else "right", no_wrap=True)
    table.add_column("status", min_width=2, max_width=26)
    for _, row in results.iterrows():
        cells = [_cell(row[name]) for name in swept]
        cells += [_shown(column, row[column.name]) for column in measures]
        style = None if row["status"] == "ok" else "red" if row["status"] == "failed" else "yellow"
        table.add_row(*cells, status_text(row), style=style)
    return table


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _shown(column: _Column, value: Any) -> str:
    return "" if pd.isna(value) or value == "" else column.show(value)


def _cell(value: Any) -> str:
    if pd.isna(value):
        return "-"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _caption(results: pd.DataFrame, swept: list[str]) -> str:
    fixed = [
        f"{_short(name)} {_cell(results[name].dropna().iloc[0])}"
        for name in _KEYS
        if name in results and name not in swept and results[name].nunique() == 1
    ]
    flags = sorted({flag for text in results.get("extrapolated", pd.Series(dtype=str)).dropna()
                    for flag in str(text).split()})  # fmt: skip
    if flags:
        fixed.append(f"beyond the measured range somewhere: {', '.join(flags)}")
    return "; ".join(fixed)
