"""One plan on many machines: decided once, then priced and run again.

The policy decides for the machine that it believes in; what really happens is another machine's
business. So machines drawn at random do not need a new plan, only new durations, and the compiled
executor makes that cheap. What readers get wrong: this is not re-planning. A policy that knew the
other machine might decide otherwise; ``objective_on`` lets it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.cost.model import CostModel
from policies.drive import drive
from policies.placement import Placement
from policies.plan.op import Op
from policies.spec.hardware import HardwareProfile
from sim.executors import KeptSteps
from sim.job import make_job
from sim.pack import Job
from sim.program_cache import ProgramCache
from sim.result import RunRecord
from sim.run import RunSpec, simulate
from sim.search import Objective
from sim.tracing import Step, UntraceableError


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a job: sums over its blocks, as in ``RunRecord``."""

    prefill_s: float
    decode_s: float
    makespan_s: float
    tpot_s: float | None


class Replay:
    """The plan of ``spec``, which must fit its machine; ``known`` are templates of other runs.

    ``placement`` is that of ``spec``, from a caller that has found it already.
    """

    def __init__(
        self,
        spec: RunSpec,
        known: ProgramCache | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.spec = spec
        self.job: Job = make_job(spec.workload, spec.model, spec.hardware, spec.policy, spec.seed)
        self.blocks = spec.policy.blocks(self.job.blocks)
        self.placement = placement or spec.policy.place(spec.model, spec.hardware, self.blocks)
        believed = spec.hardware if spec.belief is None else spec.belief
        belief = CostModel(spec.model, believed, self.placement)
        self._steps = self._decided(belief)
        self._known = ProgramCache() if known is None else known
        self._compiled = spec.engine != "simpy"

    def placed_on(self, hardware: HardwareProfile) -> Placement:
        """Where the policy would place this job on ``hardware``."""
        return self.spec.policy.place(self.spec.model, hardware, self.blocks)

    def _decided(self, belief: CostModel) -> list[tuple[list[Step], Op]]:
        """Steps and last fence of every block."""
        kept, decided = KeptSteps(self.spec.policy), []
        for fence in drive(kept, self.blocks, belief):
            decided.append((kept.taken, fence))
            kept.taken = []
        return decided

    def objective_on(
        self, objective: Objective, hardware: HardwareProfile, belief: HardwareProfile
    ) -> float | None:
        """Value on ``hardware`` of a plan decided anew for ``belief``; None if it does not count.

        Capacities must be those of the spec, so that everything lies where it did.
        """
        times = self._on(hardware, belief, anew=True)
        return objective.score(self.job, times) if objective.allows(times) else None

    def on(self, hardware: HardwareProfile) -> Times:
        """The times on ``hardware``, whose capacities must be those of the spec."""
        belief = self.spec.hardware if self.spec.belief is None else self.spec.belief
        return self._on(hardware, belief, anew=False)

    def _on(self, hardware: HardwareProfile, belief: HardwareProfile, anew: bool) -> Times:
        if self._compiled:
            try:
                mind = CostModel(self.spec.model, belief, self.placement)
                return self._run(hardware, mind, self._decided(mind) if anew else self._steps)
            except UntraceableError:
                self._compiled = False
        return _of_record(simulate(replace(self.spec, hardware=hardware, belief=belief)).record)

    def _run(
        self, hardware: HardwareProfile, belief: CostModel, decided: list[tuple[list[Step], Op]]
    ) -> Times:
        from sim.fast import run_program

        plant = CostModel(self.spec.model, hardware, self.placement)
        programs = self._known.programs(self.spec.policy, plant, belief)
        prefill_s = decode_s = makespan_s = tpot_weight = 0.0
        tpot_seqs = 0
        for block, (steps, fence) in zip(self.blocks, decided, strict=True):
            program = programs.of_block(steps, fence)
            run = run_program(program.arrays, program.n_steps, hardware.duplex)
            rest_s = run.makespan_s - run.prefill_end_s
            prefill_s += run.prefill_end_s
            decode_s += rest_s
            makespan_s += run.makespan_s
            if block.max_new > 1:
                tpot_weight += block.n_seqs * rest_s / (block.max_new - 1)
                tpot_seqs += block.n_seqs
        tpot_s = tpot_weight / tpot_seqs if tpot_seqs else None
        return Times(prefill_s, decode_s, makespan_s, tpot_s)


def _of_record(record: RunRecord) -> Times:
    if record.prefill_s is None or record.decode_s is None or record.makespan_s is None:
        raise ValueError(f"record: status is {record.status!r}, a replayed run must be ok")
    return Times(record.prefill_s, record.decode_s, record.makespan_s, record.tpot_s)
