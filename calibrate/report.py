"""The comparison report: cells with tolerances, what carries the errors, and files of it.

A cell is one request and one phase, prefill or decode step. Runs whose copies touch pageable host
memory are judged by tolerances of their own, because that rate varies from run to run. Runs with a
disk are counted apart: a drive is as fast as its other users leave it. What readers get wrong: a
simulation cannot be better than two runs of the machine agree, so each cell shows the spread of
repeats beside its error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from calibrate.compare import Comparison, KeyTime, Timing, compare
from calibrate.devices import device_warning
from calibrate.replay import (
    Memory,
    RealRun,
    Unusable,
    first_difference,
    read_runs,
    repeats,
    replay,
)
from policies.drive import wants_feedback
from policies.spec.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest median and worst absolute error over cells."""

    median: float
    worst: float

    def __post_init__(self) -> None:
        for name in ("median", "worst"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"tolerance.{name}: {getattr(self, name)} must be >= 0")


@dataclass(frozen=True, slots=True)
class RunReport:
    """One request: its comparison and what it was.

    ``closed_loop``: it decided by what it measured; its recorded decisions were simulated, as late
    as they came.
    """

    name: str
    policy: str
    model: str
    memory: Memory
    comparison: Comparison
    decisions_differ: str
    extrapolated: tuple[str, ...]
    closed_loop: bool = False

    @property
    def cells(self) -> tuple[Timing, ...]:
        """Prefill and, where there is one, the mean decode step."""
        step = self.comparison.step
        return (self.comparison.prefill, *(() if step is None else (step,)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Cells of one kind of memory against their tolerance."""

    memory: str
    n_cells: int
    median: float
    worst: float
    worst_cell: str
    tolerance: Tolerance

    @property
    def passed(self) -> bool:
        """Whether median and worst are within the tolerance."""
        return self.median <= self.tolerance.median and self.worst <= self.tolerance.worst


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is written."""

    profile: str
    devices: tuple[str, ...]
    warning: str
    runs: tuple[RunReport, ...]
    unusable: tuple[Unusable, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether all cells are within tolerance and every run executed the simulated plan."""
        same = all(r.comparison.same_plan and not r.decisions_differ for r in self.runs)
        return same and bool(self.runs) and all(v.passed for v in self.verdicts)


def make_report(
    root: Path, hardware: HardwareProfile, pinned: Tolerance, pageable: Tolerance
) -> Report:
    """Simulate and compare every run below ``root``."""
    runs, unusable = read_runs(root)
    groups, cut = _whole(repeats(runs))
    unusable = (*unusable, *cut)
    named = zip(groups, _names(groups), strict=True)
    reports = tuple(_report(group, hardware, name) for group, name in named)
    devices = tuple(sorted({str(r.result["device"]) for r in runs if r.result.get("device")}))
    warning = device_warning(hardware, devices, "the runs are of") if runs else ""
    allowed = {"pinned": pinned, "pageable": pageable, "disk": pinned}  # a disk's copies are pinned
    verdicts = tuple(
        _verdict(memory, chosen, tolerance)
        for memory, tolerance in allowed.items()
        if (chosen := [r for r in reports if r.memory == memory])
    )
    return Report(hardware.name, devices, warning, reports, unusable, verdicts)


def _whole(
    groups: Sequence[tuple[RealRun, ...]],
) -> tuple[tuple[tuple[RealRun, ...], ...], tuple[Unusable, ...]]:
    """Groups without repeats that have fewer ops than the others: their traces were cut."""
    cut = []
    whole = []
    for group in groups:
        most = max(len(run.trace.spans) for run in group)
        whole.append(tuple(run for run in group if len(run.trace.spans) == most))
        cut += [
            Unusable(run.folder, f"has {len(run.trace.spans)} ops, a repeat of it {most}: cut?")
            for run in group
            if len(run.trace.spans) < most
        ]
    return tuple(whole), tuple(cut)


def _names(groups: Sequence[Sequence[RealRun]]) -> list[str]:
    """Names of the requests; plans that one of them became in closed loop are numbered."""
    names: list[str] = []
    numbers: dict[str, int] = {}
    for run in (group[0] for group in groups):
        number = 0
        if wants_feedback(run.request.policy):
            asked = run.request.to_json()
            number = numbers[asked] = numbers.get(asked, 0) + 1
        names.append(run.request.name if number < 2 else f"{run.request.name} plan {number}")
    return names


def _report(group: Sequence[RealRun], hardware: HardwareProfile, name: str) -> RunReport:
    request = group[0].request
    simulated = replay(request, hardware, group[0].decisions, _late_s(group[0]))
    differ = next(
        (d for run in group if (d := first_difference(run.decisions, simulated.decisions))), ""
    )
    return RunReport(
        name,
        request.policy.name,
        request.model.name,
        simulated.memory,
        compare([run.trace for run in group], simulated.trace),
        differ,
        simulated.extrapolated,
        wants_feedback(request.policy),
    )


def _late_s(run: RealRun) -> tuple[float, ...]:
    late_s = run.result.get("feedback_late_s", [])
    if not isinstance(late_s, list) or not all(isinstance(s, int | float) for s in late_s):
        raise ValueError(f"{run.folder}: feedback_late_s is {late_s!r}, must be a list of seconds")
    return tuple(map(float, late_s))


def _verdict(memory: str, runs: Sequence[RunReport], tolerance: Tolerance) -> Verdict:
    errors = {f"{r.name} {cell.name}": abs(cell.error) for r in runs for cell in r.cells}
    worst = max(errors, key=lambda name: errors[name])
    return Verdict(memory, len(errors), median(errors.values()), errors[worst], worst, tolerance)


def all_keys(report: Report) -> tuple[KeyTime, ...]:
    """Ops of all runs; keys are prefixed with the name of the run."""
    return tuple(
        replace(k, key=f"{run.name}: {k.key}") for run in report.runs for k in run.comparison.keys
    )


# ---- files ------------------------------------------------------------------------------------


def write_report(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write report.json, report.md and the figures; the figures last."""
    folder.mkdir(parents=True, exist_ok=True)
    from calibrate.report_figures import draw_cells, draw_kinds
    from calibrate.report_text import markdown

    data, text = folder / "report.json", folder / "report.md"
    data.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8", newline="\n")
    text.write_text(markdown(report), encoding="utf-8", newline="\n")
    scatter, kinds = folder / "sim_against_real.png", folder / "error_by_kind.png"
    draw_cells(report, scatter)
    draw_kinds(report, kinds)
    return data, text, scatter, kinds


def as_json(report: Report) -> dict[str, object]:
    """The report as JSON values; single ops only as the carriers of errors."""
    runs = []
    for run in report.runs:
        c = run.comparison
        runs.append(
            {
                "name": run.name,
                "policy": run.policy,
                "model": run.model,
                "memory": run.memory,
                "n_repeats": c.n_repeats,
                "n_ops": len(c.keys),
                "same_plan": c.same_plan,
                "only_real": list(c.only_real),
                "only_sim": list(c.only_sim),
                "decisions_equal": not run.decisions_differ,
                "decisions_differ": run.decisions_differ,
                "closed_loop": run.closed_loop,
                "extrapolated": list(run.extrapolated),
                "timings": [_timing_json(t) for t in (*run.cells, c.makespan)],
                "steps": [_timing_json(t) for t in c.steps],
                "kinds": [asdict(g) for g in c.kinds],
                "phases": [asdict(g) for g in c.phases],
                "lanes": [asdict(g) for g in c.lanes],
                "carriers": [asdict(k) for k in c.carriers],
                "decode_bound": None if c.decode_bound is None else asdict(c.decode_bound),
            }
        )
    return {
        "profile": report.profile,
        "devices": list(report.devices),
        "warning": report.warning,
        "passed": report.passed,
        "verdicts": [{**asdict(v), "passed": v.passed} for v in report.verdicts],
        "unusable": [{"folder": u.folder.name, "reason": u.reason} for u in report.unusable],
        "runs": runs,
    }


def _timing_json(timing: Timing) -> dict[str, object]:
    return {**asdict(timing), "error": timing.error}
