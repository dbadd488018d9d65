"""Replay: the run folders of a machine, each simulated from its own request.

A folder holds ``request.json`` (what was asked for), ``trace.jsonl`` (what happened),
``decisions.csv`` and ``result.json``. What readers get wrong is which profile does what: the
request's hardware is what the policy believed, so it decides the plan; the profile named on the
command line is the machine that the plan is charged on. Only a run with feedback decided by what it
measured, which no simulation can repeat: its own decisions are replayed, and by how much each came
late, so its times are compared, and not who would have decided what.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from policies.cost.model import CostModel
from policies.drive import Decision, Policy, StepContext, wants_feedback
from policies.plan.op import Lane, Op, Tier
from policies.run_request import RunRequest, read_request
from policies.spec.hardware import HardwareProfile
from policies.text_file import read_text
from policies.trace.decisions import StepDecision, read_decisions, step_decisions
from policies.trace.jsonl import read_jsonl
from policies.trace.span import Trace, parse_key

Memory = Literal["pinned", "pageable", "disk"]

REQUEST, TRACE, DECISIONS, RESULT = (
    "request.json",
    "trace.jsonl",
    "decisions.csv",
    "result.json",
)


@dataclass(frozen=True, slots=True)
class RealRun:
    """One measured run: ``result`` is its record as written."""

    folder: Path
    request: RunRequest
    trace: Trace
    decisions: tuple[StepDecision, ...]
    result: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The simulation of a request; ``memory`` is the slowest that it moves bytes to or from."""

    trace: Trace
    decisions: tuple[StepDecision, ...]
    memory: Memory
    extrapolated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unusable:
    """A folder that cannot be compared, and why."""

    folder: Path
    reason: str


def read_runs(root: Path) -> tuple[tuple[RealRun, ...], tuple[Unusable, ...]]:
    """Every run below ``root``; a run that did not end well is unusable.

    ``ValueError`` if there is none, or naming the file that cannot be read.
    """
    runs, unusable = [], []
    for request in sorted(root.rglob(REQUEST)):
        folder = request.parent
        result = _result(folder / RESULT)
        status = result.get("status", "ok")
        if status != "ok":
            reason = f"{RESULT} says {status}: {result.get('reason', '')}"
            unusable.append(Unusable(folder, reason))
        elif lacking := [name for name in (RESULT, TRACE) if not (folder / name).exists()]:
            unusable.append(Unusable(folder, f"has no {lacking[0]}"))
        else:
            asked, decisions = read_request(request), _decisions(folder / DECISIONS)
            if wants_feedback(asked.policy) and not decisions:
                reason = f"has no {DECISIONS}, without which a closed loop cannot be replayed"
                unusable.append(Unusable(folder, reason))
                continue
            trace = read_jsonl(folder / TRACE)
            if trace.spans:
                runs.append(RealRun(folder, asked, trace, decisions, result))
            else:
                unusable.append(Unusable(folder, f"{TRACE} is empty"))
    if not runs and not unusable:
        raise ValueError(f"traces: {root} has no folder with a {REQUEST}")
    return tuple(runs), tuple(unusable)


def repeats(runs: Sequence[RealRun]) -> tuple[tuple[RealRun, ...], ...]:
    """Runs grouped by equal requests, in the order of their names.

    Runs in closed loop that decided differently ran different plans: each is a group of its own.
    """
    groups: dict[object, list[RealRun]] = {}
    for run in runs:
        decided = run.decisions if wants_feedback(run.request.policy) else ()
        groups.setdefault((run.request.to_json(), decided), []).append(run)
    return tuple(tuple(group) for group in sorted(groups.values(), key=lambda g: g[0].request.name))


def replay(
    request: RunRequest,
    hardware: HardwareProfile,
    decisions: Sequence[StepDecision] = (),
    late_s: Sequence[float] = (),
) -> Replayed:
    """Simulate a request: decided on its own machine, charged on ``hardware``.

    A request with feedback is decided as ``decisions`` say, those of its run, so the simulation's
    are the same, and delayed by ``late_s`` (see ``delayed``); without them it is simulated in open
    loop.
    """
    from sim.engine import SimBackend

    if wants_feedback(request.policy) and decisions:
        request = replace(request, policy=Recorded(request.policy, decisions))
    blocks = request.policy.blocks(request.blocks)
    placement = request.policy.place(request.model, request.machine, blocks)
    belief = CostModel(request.model, request.machine, placement)
    plant = CostModel(request.model, hardware, placement)
    decided: list[StepDecision] = []

    def observe(g: int, s: int, decision: Decision) -> None:
        decided.extend(step_decisions(blocks[g], s, decision))

    ops = tuple(request.plan(belief, observe))
    if isinstance(request.policy, Recorded):
        decided = list(decisions)
    trace = SimBackend(plant, hardware.duplex).run(ops)
    return Replayed(
        delayed(trace, late_s), tuple(decided), _memory(ops), tuple(sorted(plant.extrapolated))
    )


def delayed(trace: Trace, late_s: Sequence[float]) -> Trace:
    """A closed loop whose plans came late: by ``late_s[i]`` that of its step number i + 2.

    The first two are planned before the run. Whatever works for a step, or for a later one, moves:
    too far rather than too little, because a bubble lasts at most as long as its plan was late.
    """
    if not any(late_s):
        return trace
    keys = [parse_key(span.key) for span in trace.spans]
    steps = sorted({(key.block, key.step) for key in keys})
    padded = (*late_s, *(0.0 for _ in steps))
    waited = dict(zip(steps[2:], accumulate(padded), strict=False))
    spans = []
    for span, key in zip(trace.spans, keys, strict=True):
        more_s = waited.get((key.block, key.step), 0.0)
        spans.append(span._replace(start_s=span.start_s + more_s, end_s=span.end_s + more_s))
    return Trace(tuple(spans))


class Recorded:
    """A policy whose decisions were taken before, by a run of it in closed loop.

    A run that was cut wrote down one step more, which says what the last one stores; nothing comes
    of decisions behind that.
    """

    def __init__(self, policy: Policy, decisions: Sequence[StepDecision]) -> None:
        self.name, self.buffers = policy.name, policy.buffers
        self.blocks, self.place, self.step = policy.blocks, policy.place, policy.step
        self._rows: dict[tuple[int, int], list[StepDecision]] = {}
        for row in decisions:
            self._rows.setdefault((row.block, row.step), []).append(row)

    def decide(self, ctx: StepContext) -> Decision:
        """As it was decided; ``ValueError`` for a step up to the last one that has no rows."""
        block, step = ctx.block.index, ctx.step
        rows = self._rows.get((block, step))
        last = max((s for g, s in self._rows if g == block), default=-1)
        if rows is None and 0 <= last < step:
            return Decision(ctx.n_ctx(), (1, *(0,) * (ctx.n_batches - 1)))
        if rows is None or [row.batch for row in rows] != list(range(ctx.n_batches)):
            raise ValueError(
                f"decisions: block {block}, step {step} must have a row for each of its "
                f"{ctx.n_batches} batches"
            )
        return Decision(
            tuple(row.n_recompute for row in rows),
            tuple(row.slices for row in rows),
            n_front=tuple(row.n_front for row in rows),
            n_inputs=tuple(row.n_inputs for row in rows),
            on_cpu=tuple(row.on_cpu for row in rows),
        )


def first_difference(real: Sequence[StepDecision], sim: Sequence[StepDecision]) -> str:
    """Where two lists of decisions differ first, in words; empty if they are equal."""
    for ours, theirs in zip(sim, real, strict=False):
        if ours != theirs:
            where = theirs._asdict()
            return f"measured run decided {where}, simulation {ours[4:]} (n_recompute, slices)"
    if len(real) != len(sim):
        return f"measured run has {len(real)} decisions, simulation {len(sim)}"
    return ""


def _memory(ops: Sequence[Op]) -> Memory:
    if any(op.lane is Lane.DISK for op in ops):
        return "disk"
    slots = (slot for op in ops for slot in (*op.reads, *op.writes))
    return "pageable" if any(s.tier is Tier.HOST and not s.pinned for s in slots) else "pinned"


def _result(path: Path) -> Mapping[str, object]:
    if not path.exists():
        return {}
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds a {type(data).__name__}, must hold one JSON object")
    return data


def _decisions(path: Path) -> tuple[StepDecision, ...]:
    return read_decisions(path) if path.exists() else ()
