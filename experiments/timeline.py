"""Gantt chart of one decode step per policy: who works when, lane by lane.

Drawn from the ``trace.jsonl`` of each run; the Perfetto file beside it shows the whole run. The
window is one steady decode step, from the first layer's compute to the end of the LM head. Weights
of that first layer were loaded in the step before, those seen at the end belong to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments import style
from policies.plan.op import Kind, Lane
from policies.trace.jsonl import read_jsonl
from policies.trace.span import Span, parse_key

COLOURS = {
    Kind.LOAD_WEIGHT: "#0072B2",
    Kind.READ_WEIGHT: "#004B76",
    Kind.LOAD_KV: "#56B4E9",
    Kind.READ_KV: "#2C7FA8",
    Kind.STORE_KV: "#009E73",
    Kind.WRITE_KV: "#00664B",
    Kind.LOAD_ACT: "#B7DDF5",
    Kind.STORE_ACT: "#7FCDB5",
    Kind.READ_ACT: "#B7DDF5",
    Kind.WRITE_ACT: "#7FCDB5",
    Kind.HOST_COPY: "#E69F00",
    Kind.CPU_ATTEND: "#CC79A7",
    Kind.FORWARD: "#D55E00",
    Kind.FENCE: "#000000",
}
WORDS = {
    Kind.LOAD_WEIGHT: "load weights",
    Kind.READ_WEIGHT: "read weights from disk",
    Kind.LOAD_KV: "load KV",
    Kind.READ_KV: "read KV from disk",
    Kind.STORE_KV: "store KV",
    Kind.WRITE_KV: "write KV to disk",
    Kind.LOAD_ACT: "load activations",
    Kind.STORE_ACT: "store activations",
    Kind.READ_ACT: "read activations",
    Kind.WRITE_ACT: "write activations",
    Kind.HOST_COPY: "host copy",
    Kind.CPU_ATTEND: "attention on the CPU",
    Kind.FORWARD: "compute",
    Kind.FENCE: "synchronise",
}
_THIN = 0.0025  # of the step
_LANES = (Lane.CPU, Lane.DISK, Lane.D2H, Lane.H2D, Lane.COMPUTE)  # bottom to top
_LANE_WORDS = {Lane.COMPUTE: "GPU", Lane.H2D: "H2D", Lane.D2H: "D2H", Lane.DISK: "disk",
               Lane.CPU: "CPU"}  # fmt: skip


def window(spans: Iterable[Span]) -> tuple[list[Span], float, float, int]:
    """Spans that touch the last full decode step but one of block 0, its bounds, its number.

    ``ValueError`` if the trace has no decode step.
    """
    spans = list(spans)
    ends: dict[int, list[float]] = {}
    for span in spans:
        parts = parse_key(span.key)
        if span.kind is Kind.FORWARD and parts.block == 0 and parts.step >= 1:
            ends.setdefault(parts.step, []).extend((span.start_s, span.end_s))
    if not ends:
        raise ValueError("trace: has no decode step of block 0")
    steps = sorted(ends)
    step = steps[-2] if len(steps) > 1 else steps[-1]
    # A step lasts from the end of the one before it, so that waiting for its first layer counts.
    start = max(ends[step - 1]) if step - 1 in ends else min(ends[step])
    end = max(ends[step])
    return [s for s in spans if s.start_s < end and s.end_s > start], start, end, step


def step(results: pd.DataFrame, folder: Path, path: Path) -> None:
    """One panel a policy over a common time axis."""
    style.require(results, "run", "policy", "hardware", "n_layers")
    good = style.ok(results)
    drawn = []
    for _, row in good.iterrows():
        trace = folder / str(row["run"]) / "trace.jsonl"
        drawn.append((row, *window(read_jsonl(trace).spans)))
    first = good.iloc[0]
    title = (
        f"One decode step, {first['model']} cut to {first['n_layers']:g} layers on "
        f"{first['hardware']}, prompt {style.tokens(first['prompt_len'])}"
    )
    kinds = [k for k in COLOURS if any(s.kind is k for item in drawn for s in item[1])]
    with style.panels(path, title, (len(drawn), 1), (10.5, 1.35), sharex=True) as out:
        for axes, (row, spans, start, end, _) in zip(out.each(), drawn, strict=True):
            _gantt(axes, spans, start, end)
            n_batches = int(row["n_batches"])
            seqs = n_batches * int(row["batch_size"])
            left = int(row["n_blocks"]) - 1
            more = f", then {left} more such batches" if left else ""
            axes.set_title(
                f"{row['policy']}: {1e3 * (end - start):.0f} ms for {seqs} sequences{more}",
                loc="left",
            )
        longest = max(end - start for _, _, start, end, _ in drawn)
        out.axes[0][0].set_xlim(0.0, 1e3 * longest)
        out.axes[-1][0].set_xlabel("time (ms)")
        patches = [Patch(facecolor=COLOURS[k], label=WORDS[k]) for k in kinds]
        style.legend_below(out.figure, patches, n_columns=len(patches))


def _gantt(axes: Axes, spans: list[Span], start: float, end: float) -> None:
    lanes = [lane for lane in _LANES if any(s.lane is lane for s in spans)]
    for y, lane in enumerate(lanes):
        for kind in COLOURS:
            bars = [
                (max(s.start_s, start) - start, min(s.end_s, end) - max(s.start_s, start))
                for s in spans
                if s.lane is lane and s.kind is kind
            ]
            # A light edge separates neighbours, but would hide an op that is a hairline itself.
            thin = [(1e3 * x, 1e3 * w) for x, w in bars if w < _THIN * (end - start)]
            wide = [(1e3 * x, 1e3 * w) for x, w in bars if w >= _THIN * (end - start)]
            for part, edge in ((wide, "#FFFFFF"), (thin, COLOURS[kind])):
                if part:
                    axes.broken_barh(part, (y - 0.4, 0.8), facecolors=COLOURS[kind],
                                     edgecolor=edge, linewidth=0.3)  # fmt: skip
    axes.axvline(1e3 * (end - start), color="#333333", lw=1.0, ls=":")
    axes.set_yticks(range(len(lanes)), [_LANE_WORDS[lane] for lane in lanes])
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.grid(visible=False, axis="y")
