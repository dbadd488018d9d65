"""Comparison of a simulated and a measured run: a join of their spans by op key.

An error is always simulated over measured, less one: positive means that the simulator is slow.
What readers get wrong: errors of single ops and errors of a run are different things. Ops that
nobody waits for may be far off without moving a step, and many small errors of one sign add up; so
a kind has a bias (of its total time) beside its mean absolute error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from policies.plan.op import Lane
from policies.trace.metrics import TraceMetrics, metrics
from policies.trace.span import Trace, parse_key


@dataclass(frozen=True, slots=True)
class KeyTime:
    """One op on both sides: seconds; ``real_s`` is the median over repeated runs."""

    key: str
    kind: str
    lane: str
    phase: str  # "prefill" or "decode": the step that the op works for
    real_s: float
    sim_s: float

    @property
    def error(self) -> float:
        """Simulated over measured, less one; infinite where nothing was measured."""
        if self.real_s > 0:
            return self.sim_s / self.real_s - 1.0
        return 0.0 if self.sim_s == self.real_s else float("inf")


@dataclass(frozen=True, slots=True)
class GroupError:
    """Errors of the ops of a kind or lane.

    ``bias`` is that of their total time, ``mape`` the mean absolute error over ops with a measured
    duration (``n_zero`` have none), ``median_ratio`` the median of simulated over measured.
    """

    name: str
    n_ops: int
    n_zero: int
    real_s: float
    sim_s: float
    bias: float
    mape: float
    median_ratio: float
    worst_key: str
    worst_error: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One end-to-end number on both sides; ``spread`` is (max - min) / median over repeats."""

    name: str
    real_s: float
    sim_s: float
    spread: float

    @property
    def error(self) -> float:
        """Simulated over measured, less one."""
        return self.sim_s / self.real_s - 1.0


@dataclass(frozen=True, slots=True)
class DecodeBound:
    """Time from the end of prefill to the last decode step over the longest lane's work in it."""

    ratio: float
    lane: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run on both sides.

    ``prefill`` and ``step`` are sums over blocks and means over decode steps; ``steps`` has every
    step of every block (``g0/s0`` is the prefill of block 0). ``carriers`` are the three keys that
    differ by most seconds. ``step`` and ``decode_bound`` are None for a run that only prefills.
    """

    n_repeats: int
    keys: tuple[KeyTime, ...]
    only_real: tuple[str, ...]
    only_sim: tuple[str, ...]
    kinds: tuple[GroupError, ...]
    phases: tuple[GroupError, ...]
    lanes: tuple[GroupError, ...]
    prefill: Timing
    step: Timing | None
    makespan: Timing
    steps: tuple[Timing, ...]
    carriers: tuple[KeyTime, ...]
    decode_bound: DecodeBound | None

    @property
    def same_plan(self) -> bool:
        """Whether both sides ran the same ops."""
        return not self.only_real and not self.only_sim


def compare(real: Sequence[Trace], sim: Trace) -> Comparison:
    """Join repeated measured runs of one plan with its simulation.

    ``ValueError`` if there is no run, a key occurs twice in a trace, or nothing can be joined.
    """
    if not real:
        raise ValueError("compare: no measured run")
    measured = [_durations(trace) for trace in real]
    simulated = _durations(sim)
    common = [s for s in sim.spans if all(s.key in run for run in measured)]
    if not common:
        raise ValueError("compare: the simulated and the measured run have no op in common")
    keys = tuple(
        KeyTime(
            s.key,
            s.kind.value,
            s.lane.value,
            "decode" if parse_key(s.key).step else "prefill",
            median(run[s.key] for run in measured),
            simulated[s.key],
        )
        for s in common
    )
    known = {k.key for k in keys}
    real_metrics, sim_metrics = [metrics(trace) for trace in real], metrics(sim)
    return Comparison(
        n_repeats=len(real),
        keys=keys,
        only_real=tuple(sorted({key for run in measured for key in run} - known)),
        only_sim=tuple(s.key for s in sim.spans if s.key not in known),
        kinds=group_errors(keys, lambda k: k.kind),
        phases=group_errors(keys, kind_and_phase),
        lanes=group_errors(keys, lambda k: k.lane),
        prefill=_timing("prefill", [m.prefill_s for m in real_metrics], sim_metrics.prefill_s),
        step=_step(real_metrics, sim_metrics),
        makespan=_timing("makespan", [m.makespan_s for m in real_metrics], sim_metrics.makespan_s),
        steps=_steps(real_metrics, sim_metrics),
        carriers=tuple(sorted(keys, key=lambda k: -abs(k.sim_s - k.real_s))[:3]),
        decode_bound=decode_bound(real[0]),
    )


def group_errors(
    keys: Iterable[KeyTime], name_of: Callable[[KeyTime], str]
) -> tuple[GroupError, ...]:
    """Errors of groups of ops, the one with most measured time first."""
    groups: dict[str, list[KeyTime]] = {}
    for key in keys:
        groups.setdefault(name_of(key), []).append(key)
    errors = [_group_error(name, members) for name, members in groups.items()]
    return tuple(sorted(errors, key=lambda e: -e.real_s))


def kind_and_phase(key: KeyTime) -> str:
    """A name that tells the ops of a kind in prefill from those in decode."""
    return f"{key.kind} {key.phase}"


def _group_error(name: str, members: Sequence[KeyTime]) -> GroupError:
    timed = [k for k in members if k.real_s > 0]
    real_s, sim_s = (sum(getattr(k, side) for k in members) for side in ("real_s", "sim_s"))
    worst = max(timed, key=lambda k: abs(k.error), default=None)
    return GroupError(
        name=name,
        n_ops=len(members),
        n_zero=len(members) - len(timed),
        real_s=real_s,
        sim_s=sim_s,
        bias=sim_s / real_s - 1.0 if real_s > 0 else 0.0,
        mape=fmean(abs(k.error) for k in timed) if timed else 0.0,
        median_ratio=1.0 + median(k.error for k in timed) if timed else 1.0,
        worst_key=worst.key if worst else "",
        worst_error=worst.error if worst else 0.0,
    )


def decode_bound(trace: Trace) -> DecodeBound | None:
    """Bound ratio of the decode steps alone, over the first block; None without decode.

    Spans are counted as far as they lie between the end of prefill and the last FORWARD.
    """
    times = metrics(trace)
    block = min(parse_key(span.key).block for span in trace.spans)
    spans = [span for span in trace.spans if parse_key(span.key).block == block]
    if not times.step_s[0]:
        return None
    start = min(span.start_s for span in spans) if block else 0.0
    start += times.ttft_s[0]
    end = start + sum(times.step_s[0])
    busy = dict.fromkeys(Lane, 0.0)
    for span in spans:
        busy[span.lane] += max(0.0, min(span.end_s, end) - max(span.start_s, start))
    lane = max(busy, key=lambda k: busy[k])
    return DecodeBound((end - start) / busy[lane], lane.value) if busy[lane] > 0 else None


def _durations(trace: Trace) -> Mapping[str, float]:
    durations = {span.key: span.end_s - span.start_s for span in trace.spans}
    if len(durations) != len(trace.spans):
        seen: set[str] = set()
        twice = next(s.key for s in trace.spans if s.key in seen or seen.add(s.key))  # type: ignore[func-returns-value]
        raise ValueError(f"trace: key {twice} occurs twice")
    return durations


def _timing(name: str, real: Sequence[float], sim_s: float) -> Timing:
    middle = median(real)
    if middle <= 0:
        raise ValueError(f"trace: {name} took {middle} s, must be positive")
    return Timing(name, middle, sim_s, (max(real) - min(real)) / middle)


def _step(real: Sequence[TraceMetrics], sim: TraceMetrics) -> Timing | None:
    """Mean decode step over all blocks."""

    def mean_s(m: TraceMetrics) -> float | None:
        steps = [s for block in m.step_s for s in block]
        return fmean(steps) if steps else None

    measured = [s for m in real if (s := mean_s(m)) is not None]
    simulated = mean_s(sim)
    if not measured or simulated is None:
        return None
    return _timing("step", measured, simulated)


def _steps(real: Sequence[TraceMetrics], sim: TraceMetrics) -> tuple[Timing, ...]:
    timings = []
    for g, block in enumerate(sim.step_s):
        if any(len(m.step_s) <= g for m in real):
            continue
        timings.append(_timing(f"g{g}/s0", [m.ttft_s[g] for m in real], sim.ttft_s[g]))
        n = min(len(block), *(len(m.step_s[g]) for m in real))
        timings += [
            _timing(f"g{g}/s{i + 1}", [m.step_s[g][i] for m in real], block[i]) for i in range(n)
        ]
    return tuple(timings)
