"""The decisions of a run: every step's, kept as runs of equal ones.

A policy decides step by step but changes its mind rarely, so a log of hundreds of thousands of
steps holds a few entries. What readers get wrong: nothing is sampled; iterating gives a row for
every step and batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from policies.drive import Decision
from policies.placement import Placement
from policies.spec.workload import Block
from policies.trace.decisions import StepDecision, step_decisions
from policies.trace.sources import Run, Sources, mean_sources


@dataclass(slots=True)
class _Run:
    """Equal decisions of consecutive steps of one block."""

    block: int
    first: int
    stop: int
    decision: Decision


class DecisionLog(Collection[StepDecision]):
    """Decisions over ``blocks``, in order; ``observe`` is what ``policies.drive.drive`` calls."""

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        self._blocks = blocks
        self._runs: list[_Run] = []
        self.solvers: set[str] = set()
        self.solve_s = 0.0

    def observe(self, block: int, step: int, decision: Decision) -> None:
        """Append the decision of the next step."""
        self.solve_s += decision.solve_s
        if decision.solver:
            self.solvers.add(decision.solver)
        chosen = replace(decision, solver="", solve_s=0.0)
        if self._runs and step:
            last = self._runs[-1]
            if last.decision == chosen and (last.block, last.stop) == (block, step):
                last.stop += 1
                return
        self._runs.append(_Run(block, step, step + 1, chosen))

    def sources(self, placement: Placement, cpu: bool = False) -> Sources | None:
        """Where cached tokens came from, under the run's placement; None where none is decoded."""
        runs = (Run(run.block, run.first, run.stop, run.decision) for run in self._runs)
        return mean_sources(self._blocks, placement, runs, cpu)

    def __len__(self) -> int:
        return sum((run.stop - run.first) * len(run.decision.slices) for run in self._runs)

    def __iter__(self) -> Iterator[StepDecision]:
        for run in self._runs:
            block = self._blocks[run.block]
            for step in range(run.first, run.stop):
                yield from step_decisions(block, step, run.decision)

    def __contains__(self, decision: object) -> bool:
        return any(row == decision for row in self)
