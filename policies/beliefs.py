"""A policy with feedback that counts the beliefs under which it is asked for decisions.

What readers get wrong: it counts beliefs, not re-fits. A re-fit that changes nothing gives the same
belief, and one after the last decision is never asked under.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.cost.model import CostModel
from policies.drive import Decider, Decision, StepContext
from policies.plan.op import Op


class CountsBeliefs:
    """``policy``, asked by the generation loop; ``n_beliefs`` so far."""

    feedback = True

    def __init__(self, policy: Decider) -> None:
        self._policy = policy
        self._belief: CostModel | None = None
        self.n_beliefs = 0

    def decide(self, ctx: StepContext) -> Decision:
        """As the policy decides."""
        if ctx.belief is not self._belief:
            self._belief = ctx.belief
            self.n_beliefs += 1
        return self._policy.decide(ctx)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """The policy's."""
        return self._policy.step(ctx, now, then)
