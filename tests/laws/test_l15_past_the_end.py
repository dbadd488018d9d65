"""L15: no prefetch past the last step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.errors import PlanError
from policies.plan.check import checked
from policies.plan.op import Kind
from policies.schedule import zigzag
from tests.policies_table import CASES, POLICIES, SCENARIOS, FixedRecompute, case, planned


@pytest.mark.parametrize("scenario", ["max-new-1", "max-new-2", "all-ones", "ragged"])
def test_last_step_fetches_nothing_for_the_next(scenario):
    for name in POLICIES:
        if (name, scenario) not in CASES:
            continue
        plan = case(name, scenario)
        last = {block.index: block.max_new - 1 for block in plan.blocks}
        assert {op.step for op in plan.ops if op.block == 0} == set(range(last[0] + 1))
        assert all(op.step <= last[op.block] for op in plan.ops)
        # Behind the last layer's forwards only the LM head and what ends a block.
        tail = max(
            i
            for i, op in enumerate(plan.ops)
            if op.kind is Kind.FORWARD and op.layer == plan.model.n_layers - 1
        )
        kinds = {op.kind for op in plan.ops[tail + 1 :]}
        assert kinds <= {Kind.FORWARD, Kind.FENCE}, (name, kinds)


class Eager(FixedRecompute):
    """Prefetches in the last step too, as an engine does that waits for an end token."""

    __slots__ = ()

    def step(self, ctx, now, then):
        return zigzag(ctx, now, now if then is None else then)


def test_prefetch_past_the_end_is_named():
    plan = planned(Eager((0,)), SCENARIOS["max-new-2"])
    with pytest.raises(PlanError, match="L15") as caught:
        list(checked(plan.ops, plan.model, plan.placement, plan.blocks))
    assert caught.value.key == "load_weight/g0/s2/l0/b0/p0"


def test_step_of_another_block_is_named():
    plan = case("recompute-one", "ragged")
    ops = [replace(op, step=4) if op.block == 0 and op.step == 2 else op for op in plan.ops]
    with pytest.raises(PlanError, match="L15"):
        list(checked(ops, plan.model, plan.placement, plan.blocks))
