"""Templates that runs share: a sweep's cells and a search's candidates are much alike.

Tracing a policy takes longer than running what was traced, and a template holds wherever its guards
do, whatever the job. What readers get wrong: it is not the job that must be the same but all that a
step may look at beside its numbers: the policy, the model, the placement, what the policy believes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.cost.model import CostModel
from policies.drive import Policy
from policies.placement import Placement
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec

if TYPE_CHECKING:
    from sim.program import Programs

_MAX_KEPT = 256  # sets of templates, a few of 0.1 MB each


class ProgramCache:
    """Programs by all that their templates depend on."""

    def __init__(self) -> None:
        self._known: dict[
            tuple[Policy, ModelSpec, Placement], list[tuple[HardwareProfile, Programs]]
        ] = {}
        self._n_kept = 0

    def programs(self, policy: Policy, plant: CostModel, belief: CostModel) -> Programs:
        """Programs priced by ``plant`` for steps that are decided with ``belief``."""
        # Here, not above: loading the compiler takes half a second that a SimPy run does not need.
        from sim.program import Programs

        try:
            alike = self._known.setdefault((policy, plant.model, plant.placement), [])
        except TypeError:  # a policy that cannot be hashed: each run has its own
            return Programs(policy, plant.model, plant.placement, plant)
        for hardware, known in alike:
            if hardware == belief.hardware:
                return known.with_costs(plant)
        if self._n_kept >= _MAX_KEPT:
            self._known, self._n_kept = {}, 0
            return self.programs(policy, plant, belief)
        programs = Programs(policy, plant.model, plant.placement, plant)
        alike.append((belief.hardware, programs))
        self._n_kept += 1
        return programs
