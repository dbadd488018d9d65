"""Drift: whether a stored profile still describes this machine.

A handful of points a number is measured again; their total time is held against what the profile
says. A number has drifted if one exceeds the other by more than twice its stated residual, twice
the spread of the repeats now and five per cent, or by half: a poor fit excuses no more. What
readers get wrong: a drift of pageable copies is often real and comes back; they depend on where the
memory lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic

from calibrate.bench import Bench
from calibrate.devices import device_warning
from calibrate.grid import CHECKS, PASSES, Case, cases, ordered
from calibrate.machine import machine
from calibrate.measure import Runner
from calibrate.predict import predicted_s
from calibrate.presets import Preset
from calibrate.quality import GROUPS_OF, LINK_FROM_BYTES
from calibrate.record import Machine, Point
from policies.spec.hardware import HardwareProfile

MIN_TOLERANCE, MAX_TOLERANCE = 0.05, 0.5
_TIMES = 2.0  # the residual, or the spread


@dataclass(frozen=True, slots=True)
class Drifted:
    """One number: ``off`` is how much longer the profile says than is measured now.

    Negative: how much longer it takes now than the profile says. So both count alike.
    """

    field: str
    n_points: int
    off: float
    tolerance: float
    reason: str = ""  # why nothing could be measured

    @property
    def drifted(self) -> bool:
        """Whether the number no longer fits, be it too fast or too slow."""
        return abs(self.off) > self.tolerance


@dataclass(frozen=True, slots=True)
class DriftReport:
    """All numbers that were measured again."""

    numbers: tuple[Drifted, ...]
    warning: str

    @property
    def drifted(self) -> bool:
        """Whether any number has drifted."""
        return any(number.drifted for number in self.numbers)


def drift(
    hardware: HardwareProfile, bench: Bench, preset: Preset, seed: int, budget_s: float
) -> DriftReport:
    """Measure a handful of points on this machine and judge ``hardware`` by them."""
    here = machine(bench)
    runner = Runner(bench, preset)
    start = monotonic()
    try:
        points = [
            runner.point(case, here)
            for case in ordered(tuple(handful(preset)), seed)
            if monotonic() - start < budget_s
        ]
    finally:
        runner.close()
    return judge(hardware, points, here)


def judge(hardware: HardwareProfile, points: Sequence[Point], here: Machine) -> DriftReport:
    """Hold measured points against a profile."""
    numbers = []
    for field, groups in GROUPS_OF.items():
        taken = [p for p in points if p.group in groups]
        timed = [p for p in taken if p.seconds]
        source = hardware.provenance.get(field)
        residual = source.residual if source is not None else None
        spread = median(p.spread for p in timed) if timed else 0.0
        doubt = _TIMES * max(residual or 0.0, spread)
        tolerance = min(max(MIN_TOLERANCE, doubt), MAX_TOLERANCE)
        if timed:
            said_s = sum(predicted_s(hardware, p.group, p.x) for p in timed)
            now_s = sum(p.median_s for p in timed)
            off = said_s / now_s - 1.0 if said_s >= now_s else 1.0 - now_s / said_s
            numbers.append(Drifted(field, len(timed), off, tolerance))
        elif taken:
            numbers.append(Drifted(field, 0, 0.0, tolerance, taken[0].skipped))
    return DriftReport(tuple(numbers), device_warning(hardware, (here.device,), "this is"))


def handful(preset: Preset) -> Iterator[Case]:
    """Two or three amounts of every number, with all shapes that its fit combines."""
    groups: dict[str, list[Case]] = {}
    for case in cases(preset):
        if case.fit and case.group not in ("memory", "power", *CHECKS):
            groups.setdefault(case.group, []).append(case)
    for group, members in groups.items():
        key = {"attention_window": "queries", **dict.fromkeys(("gemm", *PASSES), "rows")}.get(group)
        key = key or ("keys" if "keys" in members[0].x else "nbytes")
        if key not in members[0].x:
            yield from members
            continue
        if group == "attention_window":  # one context is enough
            middle = sorted({case.x["keys"] for case in members})
            members = [c for c in members if c.x["keys"] == middle[len(middle) // 2]]
        amounts = sorted({case.x[key] for case in members})
        floor = LINK_FROM_BYTES.get(group, 0.0)
        amounts = [a for a in amounts if a >= floor] or amounts[-1:]
        chosen = {amounts[len(amounts) // 2], amounts[-1]}
        chosen |= {amounts[0]} if group == "gemm" else set()
        yield from (case for case in members if case.x[key] in chosen)


def rows(report: DriftReport) -> list[tuple[str, ...]]:
    """Header and rows of the drift table, as text."""
    table: list[tuple[str, ...]] = [
        ("number", "points", "profile slower (+) or faster (-)", "tolerance", "verdict")
    ]
    for n in report.numbers:
        if n.reason:
            table.append((n.field, "0", "-", f"{n.tolerance:.1%}", f"not measured: {n.reason}"))
        else:
            verdict = "drifted" if n.drifted else "fits"
            line = (n.field, str(n.n_points), f"{n.off:+.1%}", f"{n.tolerance:.1%}", verdict)
            table.append(line)
    return table
