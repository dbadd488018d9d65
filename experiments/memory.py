"""The six memory footprints that TightLLM prints, exactly, beside what a run really books.

The published "GB" are GiB rounded down, of FlexGen's formula and the prompt alone. The simulated
peaks hold transfer buffers and the embeddings too, and are spread over GPU, host and disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments import style
from experiments.load import run_config
from policies.cost.footprint import GIB, Footprint, exact_footprint, paper_footprint
from policies.spec.model import ModelSpec

PUBLISHED = (  # model, sequences, prompt length, whole "GB" in the paper
    ("opt-30b", 8, 512, 61),
    ("opt-30b", 8, 8192, 140),
    ("opt-30b", 4, 2048, 66),
    ("opt-30b", 64, 2048, 225),
    ("opt-175b", 8, 512, 343),
    ("opt-175b", 8, 8192, 614),
)
_PARTS = {
    "weights": ("weight_bytes", "#0072B2"),
    "KV cache": ("kv_bytes", "#E69F00"),
    "hidden states": ("hidden_bytes", "#009E73"),
}
_TIERS = {"gpu": "#D55E00", "host": "#999999", "disk": "#444444"}


@dataclass(frozen=True, slots=True)
class Case:
    """A published number, both counts of it, and the run of the same job."""

    name: str
    printed: int
    paper: Footprint
    exact: Footprint
    run: pd.Series


def cases(results: pd.DataFrame, folder: Path) -> list[Case]:
    """The published cases that are among the runs; model shapes come from the runs' configs."""
    found = []
    for model, n_seqs, n_tokens, printed in PUBLISHED:
        same = results[
            (results["model"] == model)
            & (results["batch_size"] == n_seqs)
            & (results["prompt_len"] == n_tokens)
        ]
        if same.empty:
            continue
        run = same.iloc[0]
        shape = run_config(folder, run["run"])["model"]
        fields = {name: shape[name] for name in ModelSpec.__dataclass_fields__ if name in shape}
        spec = ModelSpec(**fields)
        found.append(
            Case(
                f"{model.upper()}\n{n_seqs} x {style.tokens(n_tokens)}",
                printed,
                paper_footprint(spec, n_seqs, n_tokens),
                exact_footprint(spec, n_seqs, n_tokens),
                run,
            )
        )
    return found


def table(results: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """The published cases, a row each, in GiB; ``booked_gib`` is NaN where the run did not fit.

    ``ValueError`` if none of the six is among the runs.
    """
    return pd.DataFrame(
        {
            "model": case.run["model"],
            "batch_size": int(case.run["batch_size"]),
            "prompt_len": int(case.run["prompt_len"]),
            "paper_prints": case.printed,
            "formula_whole_gib": case.paper.whole_gib,
            **{
                field.replace("bytes", "gib"): getattr(case.paper, field) / GIB
                for field, _ in _PARTS.values()
            },
            "formula_gib": case.paper.total_bytes / GIB,
            "exact_gib": case.exact.total_bytes / GIB,
            "booked_gib": _booked_gib(case.run),
        }
        for case in _some(results, folder)
    )


def footprints(results: pd.DataFrame, folder: Path, path: Path) -> None:
    """Stacked bars of the paper's count and of the simulated peaks, and a table of both."""
    known = _some(results, folder)
    title = "Memory of a generation job: TightLLM's six numbers"
    with style.panels(path, title, (2, 1), (9.5, 3.2)) as out:
        chart, lower = out.axes[0][0], out.axes[1][0]
        _bars(chart, known)
        _table(lower, known)
        handles = [Patch(facecolor=shade, label=name) for name, (_, shade) in _PARTS.items()]
        handles += [
            Patch(facecolor=shade, label=f"simulated peak, {tier}")
            for tier, shade in _TIERS.items()
        ]
        style.legend_below(out.figure, handles, n_columns=3)


def _some(results: pd.DataFrame, folder: Path) -> list[Case]:
    known = cases(results, folder)
    if not known:
        raise ValueError("results: hold none of the six published cases")
    return known


def _bars(axes: Axes, known: list[Case]) -> None:
    for i, case in enumerate(known):
        bottom = 0.0
        for name, shade in _PARTS.values():
            height = getattr(case.paper, name) / GIB
            axes.bar(i - 0.2, height, 0.36, bottom=bottom, color=shade)
            bottom += height
        axes.annotate(f"{case.paper.whole_gib}", (i - 0.2, bottom), ha="center", va="bottom",
                      fontweight="bold")  # fmt: skip
        bottom = 0.0
        for tier, shade in _TIERS.items():
            peak = case.run.get(f"peak_{tier}_bytes")
            if pd.notna(peak):
                axes.bar(i + 0.2, peak / GIB, 0.36, bottom=bottom, color=shade)
                bottom += peak / GIB
        if case.run["status"] != "ok":
            axes.annotate(case.run["status"], (i + 0.2, 0), ha="center", va="bottom")
    axes.set_xticks(range(len(known)), [case.name for case in known])
    axes.set_ylabel("GiB")
    axes.margins(y=0.12)
    axes.grid(visible=False, axis="x")
    axes.set_title("left: the paper's formula; right: simulated peaks of tightllm on "
                   f"{known[0].run['hardware']}, one batch")  # fmt: skip


def _table(axes: Axes, known: list[Case]) -> None:
    axes.set_axis_off()
    head = ["GiB", *(case.name.replace("\n", " ") for case in known)]
    rows = [["paper prints (GB)", *(str(case.printed) for case in known)],
            ["formula, rounded down", *(str(case.paper.whole_gib) for case in known)]]  # fmt: skip
    for name, (field, _) in _PARTS.items():
        rows.append([name, *(f"{getattr(case.paper, field) / GIB:.3f}" for case in known)])
    rows.append(["formula", *(f"{case.paper.total_bytes / GIB:.3f}" for case in known)])
    rows.append(["exact parameters", *(f"{case.exact.total_bytes / GIB:.3f}" for case in known)])
    rows.append(["simulated peak, all tiers", *(_peak(case.run) for case in known)])
    table = axes.table([head, *rows], loc="center", cellLoc="right", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(8.5)
    table.auto_set_column_width(list(range(len(head))))
    table.scale(1.0, 1.35)


def _peak(run: pd.Series) -> str:
    booked = _booked_gib(run)
    return str(run["status"]) if pd.isna(booked) else f"{booked:.1f}"


def _booked_gib(run: pd.Series) -> float:
    """Sum of the tiers' peaks, NaN unless all are known."""
    peaks = [run.get(f"peak_{tier}_bytes") for tier in _TIERS]
    known = [float(peak) for peak in peaks if peak is not None and pd.notna(peak)]
    return sum(known) / GIB if len(known) == len(_TIERS) else float("nan")
