"""The comparison report as Markdown: verdicts, cells, ops by kind and lane, what carries errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from calibrate.compare import GroupError, group_errors, kind_and_phase
from calibrate.report import Report, RunReport, all_keys

_LISTED = 5  # keys named in a list of keys
Rows = list[tuple[str, ...]]


def markdown(report: Report) -> str:
    """The report as Markdown."""
    keys = all_keys(report)
    parts = [
        f"# Simulator against machine: {report.profile}",
        "Errors are simulated over measured, less one: positive means that the simulator is slow. "
        "The profile is a fit of microbenchmarks; no run below was used for it.",
        *([f"Device: {', '.join(report.devices)}."] if report.devices else []),
        *([f"**Warning**: {report.warning}."] if report.warning else []),
        f"**{'Passed' if report.passed else 'Failed'}**: {len(report.runs)} requests.",
        _table(_verdict_rows(report)),
        *_same_plans(report),
        "## Cells",
        _table(_cell_rows(report.runs)),
        "## Ops by kind, all runs",
        _table(_group_rows(group_errors(keys, lambda k: k.kind))),
        "## Ops by kind and phase, all runs",
        _table(_group_rows(group_errors(keys, kind_and_phase))),
        "## Ops by lane, all runs",
        _table(_group_rows(group_errors(keys, lambda k: k.lane))),
        *_misses(report),
        *_differences(report),
        *_left_out(report),
    ]
    return "\n\n".join(parts) + "\n"


def _verdict_rows(report: Report) -> Rows:
    rows: Rows = [("memory", "cells", "median error", "allowed", "worst error", "allowed",
             "worst cell", "verdict")]  # fmt: skip
    rows += [
        (v.memory, str(v.n_cells), f"{v.median:.1%}", f"{v.tolerance.median:.0%}",
         f"{v.worst:.1%}", f"{v.tolerance.worst:.0%}", v.worst_cell,
         "pass" if v.passed else "fail")
        for v in report.verdicts
    ]  # fmt: skip
    return rows


def _same_plans(report: Report) -> list[str]:
    """Whether both sides ran the same plans; of how many cells the runs decided otherwise."""
    n = sum(len(run.cells) for run in report.runs if run.decisions_differ)
    if not n and all(run.comparison.same_plan for run in report.runs) and report.runs:
        return ["Every plan and every decision is the same on both sides."]
    if not n:
        return []
    total = sum(len(run.cells) for run in report.runs)
    return [
        f"Cells of runs with other decisions than the simulated ones: {n} of {total}. Medians and "
        "worst errors above contain them, and any such run fails the report."
    ]


def _cell_rows(runs: Iterable[RunReport]) -> Rows:
    rows: Rows = [("run", "policy", "phase", "measured", "simulated", "error", "spread", "repeats",
             "decode bound, measured", "flags")]  # fmt: skip
    for run in runs:
        c = run.comparison
        bound = c.decode_bound
        for cell in (*run.cells, c.makespan):
            spread = f"{cell.spread:.1%}" if c.n_repeats > 1 else "-"
            shown = f"{bound.ratio:.3f} ({bound.lane})" if bound and cell is c.step else ""
            flags = [] if c.same_plan else ["other plan"]
            flags += ["other decisions"] if run.decisions_differ else []
            flags += ["closed loop, its decisions as late as they came"] if run.closed_loop else []
            flags += [f"extrapolated {name}" for name in run.extrapolated]
            rows.append(
                (run.name, run.policy, cell.name, f"{cell.real_s * 1e3:.2f} ms",
                 f"{cell.sim_s * 1e3:.2f} ms", f"{cell.error:+.1%}", spread,
                 str(c.n_repeats), shown, ", ".join(flags))
            )  # fmt: skip
    return rows


def _group_rows(groups: Iterable[GroupError]) -> Rows:
    rows: Rows = [("ops of", "count", "measured", "simulated", "bias", "mean abs error",
                   "median ratio", "worst", "worst key", "untimed")]  # fmt: skip
    rows += [
        (g.name, str(g.n_ops), f"{g.real_s:.4g} s", f"{g.sim_s:.4g} s", f"{g.bias:+.1%}",
         f"{g.mape:.1%}", f"{g.median_ratio:.3f}", f"{g.worst_error:+.1%}", g.worst_key,
         str(g.n_zero))
        for g in groups
    ]  # fmt: skip
    return rows


def _misses(report: Report) -> list[str]:
    """Runs with a cell beyond its tolerance, and the ops that carry the error."""
    limits = {v.memory: v.tolerance.worst for v in report.verdicts}
    parts = []
    for run in report.runs:
        limit = limits[run.memory]
        off = [cell for cell in run.cells if abs(cell.error) > limit]
        if off:
            cells = ", ".join(f"{cell.name} {cell.error:+.1%}" for cell in off)
            lines = [f"### {run.name}: {cells}"]
            lines += [
                f"- {k.key}: measured {k.real_s * 1e3:.3f} ms, simulated {k.sim_s * 1e3:.3f} ms "
                f"({k.error:+.1%})"
                for k in run.comparison.carriers
            ]
            lines += [
                f"- all {g.name}: {g.sim_s - g.real_s:+.4g} s ({g.bias:+.1%})"
                for g in sorted(run.comparison.phases, key=lambda g: -abs(g.sim_s - g.real_s))[:3]
            ]
            parts.append("\n".join(lines))
    return ["## What carries the errors", *parts] if parts else []


def _differences(report: Report) -> list[str]:
    """Runs that are in the tables, though their plans or decisions differ."""
    lines = []
    for run in report.runs:
        c = run.comparison
        for side, keys in (("measured", c.only_real), ("simulated", c.only_sim)):
            if keys:
                named = ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")
                lines.append(f"- {run.name}: {len(keys)} ops only in the {side} run: {named}")
        if run.decisions_differ:
            lines.append(f"- {run.name}: {run.decisions_differ}")
    return ["## Plans or decisions that differ", "\n".join(lines)] if lines else []


def _left_out(report: Report) -> list[str]:
    """Folders that could not be compared, which no table has."""
    lines = [f"- {u.folder.name}: {u.reason}" for u in report.unusable]
    return ["## Runs left out", "\n".join(lines)] if lines else []


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)
