"""Replay: the run folders of a machine, each simulated from its own request.

A folder holds ``request.json`` (what was asked for), ``trace.jsonl`` (what happened),
``decisions.csv`` and ``result.json``. What readers get wrong is which profile does what: the
request's hardware is what the policy believed, so it decides the plan; the profile named on the
command line is the machine that the plan is charged on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from policies.cost.model import CostModel
from policies.drive import Decision
from policies.plan.op import Op, Tier
from policies.run_request import RunRequest, read_request
from policies.spec.hardware import HardwareProfile
from policies.trace.decisions import StepDecision, read_decisions, step_decisions
from policies.trace.jsonl import read_jsonl
from policies.trace.span import Trace

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
    """The simulation of a request; ``pageable``: whether copies touch pageable host memory."""

    trace: Trace
    decisions: tuple[StepDecision, ...]
    pageable: bool
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
        elif not (folder / TRACE).exists():
            unusable.append(Unusable(folder, f"has no {TRACE}"))
        else:
            runs.append(
                RealRun(
                    folder,
                    read_request(request),
                    read_jsonl(folder / TRACE),
                    _decisions(folder / DECISIONS),
                    result,
                )
            )
    if not runs and not unusable:
        raise ValueError(f"traces: {root} has no folder with a {REQUEST}")
    return tuple(runs), tuple(unusable)


def repeats(runs: Sequence[RealRun]) -> tuple[tuple[RealRun, ...], ...]:
    """Runs grouped by equal requests, in the order of their names."""
    groups: dict[str, list[RealRun]] = {}
    for run in runs:
        groups.setdefault(run.request.to_json(), []).append(run)
    return tuple(tuple(group) for group in sorted(groups.values(), key=lambda g: g[0].request.name))


def replay(request: RunRequest, hardware: HardwareProfile) -> Replayed:
    """Simulate a request: decided on its own machine, charged on ``hardware``."""
    from sim.engine import SimBackend

    blocks = request.policy.blocks(request.blocks)
    placement = request.policy.place(request.model, request.machine, blocks)
    belief = CostModel(request.model, request.machine, placement)
    plant = CostModel(request.model, hardware, placement)
    decided: list[StepDecision] = []

    def observe(g: int, s: int, decision: Decision) -> None:
        decided.extend(step_decisions(blocks[g], s, decision))

    ops = tuple(request.plan(belief, observe))
    trace = SimBackend(plant, hardware.duplex).run(ops)
    pageable = any(_pageable(op) for op in ops)
    return Replayed(trace, tuple(decided), pageable, tuple(sorted(plant.extrapolated)))


def first_difference(real: Sequence[StepDecision], sim: Sequence[StepDecision]) -> str:
    """Where two lists of decisions differ first, in words; empty if they are equal."""
    for ours, theirs in zip(sim, real, strict=False):
        if ours != theirs:
            where = theirs._asdict()
            return f"measured run decided {where}, simulation {ours[4:]} (n_recompute, slices)"
    if len(real) != len(sim):
        return f"measured run has {len(real)} decisions, simulation {len(sim)}"
    return ""


def _pageable(op: Op) -> bool:
    return any(s.tier is Tier.HOST and not s.pinned for s in (*op.reads, *op.writes))


def _result(path: Path) -> Mapping[str, object]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds a {type(data).__name__}, must hold one JSON object")
    return data


def _decisions(path: Path) -> tuple[StepDecision, ...]:
    return read_decisions(path) if path.exists() else ()
