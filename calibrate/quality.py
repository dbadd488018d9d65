"""How good a fit is: residual, leave-one-out error, error on held-out points, and a verdict.

All errors are of predicted over measured seconds, less one. ``residual`` is the median absolute
error over the points that were fitted, weighted by their work, so that it says what a run will
see; ``worst`` is the largest. What readers get wrong is trusting the residual: a curve passes
through its own points. The leave-one-out error says what it does between them, and held-out points
what it does for shapes it has never seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from calibrate.fit import fit_link, weighted_median
from calibrate.grid import CHECKS, DISK, DUPLEX, LINKS, PASSES
from calibrate.predict import predicted_s, work
from calibrate.record import Point
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile

MIN_LINK_POINTS = 3
GOOD_RESIDUAL = 0.05
GOOD_LEAVE_ONE_OUT = 0.10
GOOD_HELD_OUT = 0.10
RULE = (
    f"good: residual at most {GOOD_RESIDUAL:.0%}, median leave-one-out error at most "
    f"{GOOD_LEAVE_ONE_OUT:.0%}, median error on held-out points at most {GOOD_HELD_OUT:.0%}; "
    "unchecked: a good residual, with no point left to test it"
)

# Fields of a profile that are fitted, and the groups whose points they are fitted to.
GROUPS_OF: Mapping[str, tuple[str, ...]] = {
    **{link: (link,) for link in (*LINKS, *DISK)},
    "duplex": DUPLEX,
    "hbm_bytes_per_s": ("hbm",),
    **{name: (name,) for name in PASSES},
    "gemm": ("gemm",),
    "attention_decode": ("attention_decode",),
    "attention_prefill": ("attention_prefill",),
    "attention_window": ("attention_window",),
    "attention_unfused_decode": ("attention_unfused_decode",),
    "attention_unfused_scores": ("attention_unfused_prefill",),
    "cpu_attention_bytes_per_s": ("cpu_attention",),
    "cpu_bytes_per_s": ("cpu_read",),
    "launch_s": ("launch",),
    "sync_s": ("sync",),
}

# Below these sizes a link is not fitted: the engine moves weights and KV in larger copies, and
# pageable copies of up to a staging buffer run at another rate.
LINK_FROM_BYTES: Mapping[str, float] = {
    "h2d": 256 * 2**10,
    "d2h": 256 * 2**10,
    "h2d_pageable": 64 * 2**20,
    "d2h_pageable": 64 * 2**20,
    "host_copy": 16 * 2**20,
    "disk_read": 0.0,
    "disk_write": 0.0,
}


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of one fitted field, or of a check (``fitted`` false); None: cannot be said."""

    field: str
    fitted: bool
    n_points: int
    residual: float | None
    worst: float | None
    loo_median: float | None
    loo_worst: float | None
    n_held: int
    held_median: float | None
    held_worst: float | None
    spread: float  # median over points of the interquartile range of repeats / their median
    note: str = ""

    @property
    def good(self) -> bool:
        """The verdict, by ``RULE``; what cannot be said does not speak against a fit."""
        limits = (
            (self.residual, GOOD_RESIDUAL),
            (self.loo_median, GOOD_LEAVE_ONE_OUT),
            (self.held_median, GOOD_HELD_OUT),
        )
        return not self.note and all(v is None or v <= limit for v, limit in limits)

    @property
    def verdict(self) -> str:
        """``good``, ``poor``, or ``unchecked`` where no point but the fitted ones speaks for it."""
        if not self.good:
            return "poor"
        checked = self.loo_median is not None or self.held_median is not None
        return "good" if checked else "unchecked"


def fit_points(points: Iterable[Point], field: str) -> tuple[Point, ...]:
    """The points that a field is fitted to: timed, not held out, within a link's sizes."""
    timed = [p for p in points if p.group in GROUPS_OF[field] and p.fit and p.seconds]
    floor = LINK_FROM_BYTES.get(field)
    if floor is None:
        return tuple(timed)
    timed.sort(key=lambda p: p.x["nbytes"])
    large = [p for p in timed if p.x["nbytes"] >= floor]
    return tuple(large if len(large) >= MIN_LINK_POINTS else timed[-MIN_LINK_POINTS:])


def quickest_s(points: Iterable[Point], field: str) -> float:
    """Seconds of the quickest copy over a link, of any size that a fit may see."""
    return min(p.median_s for p in points if p.group == field and p.fit and p.seconds)


def held_points(points: Iterable[Point], field: str) -> tuple[Point, ...]:
    """The points that a field is judged by: held out, of the sizes that it is meant for."""
    floor = LINK_FROM_BYTES.get(field, 0.0)
    groups = GROUPS_OF.get(field, (field,))
    held = [p for p in points if p.group in groups and not p.fit and p.seconds]
    large = tuple(p for p in held if p.x.get("nbytes", floor) >= floor)
    return large or tuple(held)


def assess(
    hardware: HardwareProfile, points: Sequence[Point], notes: Mapping[str, str]
) -> tuple[Quality, ...]:
    """Quality of every field that was fitted, then of the checks; ``notes`` flags a field."""
    rows = []
    for field in (*GROUPS_OF, *CHECKS):
        used = fit_points(points, field) if field in GROUPS_OF else ()
        held = held_points(points, field)
        if (not used and not held) or getattr(hardware, field, 0.0) is None:
            continue
        errors = [abs(error(hardware, p)) for p in used]
        off = [abs(error(hardware, p)) for p in held]
        left_out = [abs(e) for e in _leave_one_out(hardware, field, used, points)]
        rows.append(
            Quality(
                field=field,
                fitted=bool(used),
                n_points=len(used),
                residual=_residual(errors, used),
                worst=max(errors, default=None),
                loo_median=median(left_out) if left_out else None,
                loo_worst=max(left_out, default=None),
                n_held=len(held),
                held_median=median(off) if off else None,
                held_worst=max(off, default=None),
                spread=median(p.spread for p in (*used, *held)),
                note=notes.get(field, ""),
            )
        )
    return tuple(rows)


def _residual(errors: Sequence[float], used: Sequence[Point]) -> float | None:
    if len(used) == 1:  # it fits itself; how far its repeats differ is what can be said
        return used[0].spread
    return weighted_median(errors, [work(p.group, p.x) for p in used]) if used else None


def error(hardware: HardwareProfile, point: Point) -> float:
    """Predicted over measured seconds, less one."""
    return predicted_s(hardware, point.group, point.x) / point.median_s - 1.0


def _leave_one_out(
    hardware: HardwareProfile, field: str, used: Sequence[Point], points: Sequence[Point]
) -> tuple[float, ...]:
    if field in LINK_FROM_BYTES and used:
        return leave_one_out_link(used, quickest_s(points, field))
    value = getattr(hardware, field, None)
    if isinstance(value, Curve):
        return leave_one_out_curve(value)
    if isinstance(value, Grid):
        return leave_one_out_grid(value)
    return ()


def leave_one_out_link(used: Sequence[Point], most_latency_s: float) -> tuple[float, ...]:
    """Error at each size of the link fitted to the others; empty if fewer than three remain."""
    if len(used) <= MIN_LINK_POINTS:
        return ()
    errors = []
    for left in used:
        others = [p for p in used if p is not left]
        link = fit_link(others, most_latency_s).link
        errors.append(link.seconds(left.x["nbytes"]) / left.median_s - 1.0)
    return tuple(errors)


def leave_one_out_curve(curve: Curve) -> tuple[float, ...]:
    """Error in seconds at each inner point of the curve through the others."""
    errors = []
    for i in range(1, len(curve.x) - 1):
        rest = Curve(curve.x[:i] + curve.x[i + 1 :], curve.y[:i] + curve.y[i + 1 :])
        errors.append(curve.y[i] / rest(curve.x[i]) - 1.0)
    return tuple(errors)


def leave_one_out_grid(grid: Grid) -> tuple[float, ...]:
    """The same along both axes of a window grid, where it has no more queries than keys."""
    lines: list[Curve] = []
    for j, keys in enumerate(grid.y):
        queries = tuple(q for q in grid.x if q <= keys)
        lines.append(Curve(queries, tuple(row[j] for row in grid.z[: len(queries)])))
    for row, fewest in zip(grid.z, grid.x, strict=True):
        contexts = tuple(keys for keys in grid.y if keys >= fewest)
        lines.append(Curve(contexts, row[len(row) - len(contexts) :]))
    return tuple(e for line in lines for e in leave_one_out_curve(line))


def table(qualities: Sequence[Quality]) -> list[tuple[str, ...]]:
    """Header and rows of the fit-quality table, as text."""
    header = ("number", "points", "residual", "worst", "left out", "worst", "held out", "median",
              "worst", "spread", "verdict")  # fmt: skip
    rows: list[tuple[str, ...]] = [header]
    for q in qualities:
        name = q.field if q.fitted else f"{q.field} (check)"
        rows.append(
            (name, str(q.n_points), _share(q.residual), _share(q.worst), _share(q.loo_median),
             _share(q.loo_worst), str(q.n_held), _share(q.held_median), _share(q.held_worst),
             _share(q.spread), q.verdict + (f": {q.note}" if q.note else ""))
        )  # fmt: skip
    return rows


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
