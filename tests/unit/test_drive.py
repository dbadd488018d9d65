"""The generation loop: two decisions in hand, a fence between blocks; a policy in one page."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import policies
from policies.conformance import check_policy
from policies.cost.model import CostModel
from policies.drive import Decision, StepContext, drive
from policies.plan.op import Kind
from policies.spec.workload import Batch, Block
from tests.policies_table import OPT, SMALL, FixedRecompute, Scenario, planned

BLOCKS = (Block(0, (Batch(4, 10), Batch(2, 7)), 3), Block(1, (Batch(4, 5),), 1))


class Recorder(FixedRecompute):
    """Notes what it is asked."""

    __slots__ = ("asked", "stepped")

    def __init__(self, n_recompute: tuple[int, ...]) -> None:
        super().__init__(n_recompute)
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "stepped", [])

    def decide(self, ctx: StepContext) -> Decision:
        self.asked.append((ctx.block.index, ctx.step, ctx.n_ctx(), ctx.n_stored))
        return super().decide(ctx)

    def step(self, ctx, now, then):
        self.stepped.append((ctx.block.index, ctx.step, ctx.n_stored, now, then))
        return super().step(ctx, now, then)


def run(n_recompute=(2, 0, 3)):
    policy = Recorder(n_recompute)
    plan = planned(policy, Scenario(OPT, BLOCKS))
    return policy, plan


def test_each_step_is_decided_once_before_it_is_emitted():
    policy, _ = run()
    assert [(g, s) for g, s, _, _ in policy.asked] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [n_ctx for _, _, n_ctx, _ in policy.asked] == [(0, 0), (10, 7), (11, 8), (0,)]
    decided = [s for s in policy.stepped if s[0] == 0]
    for (*_, then), (*_, now, _) in pairwise(decided):
        assert then == now
    assert decided[-1][-1] is None


def test_stored_tokens_only_grow():
    policy, _ = run()
    # Prefill stores all but what step 1 recomputes, which is nothing; step 2 recomputes three.
    assert [stored for g, _, stored, _, _ in policy.stepped if g == 0] == [(0, 0), (10, 7), (10, 7)]
    policy, _ = run((0, 4, 1))
    assert [stored for g, _, stored, _, _ in policy.stepped if g == 0] == [(0, 0), (6, 3), (10, 7)]


def test_a_fence_ends_each_block():
    _, plan = run()
    fences = [op for op in plan.ops if op.kind is Kind.FENCE]
    assert [(op.block, op.step, op.layer, op.batch) for op in fences] == [
        (0, 2, 3, 2),
        (1, 0, 3, 1),
    ]
    assert plan.ops[-1] is fences[-1]
    order = [op.block for op in plan.ops]
    assert order == sorted(order)


def test_observer_sees_every_decision_in_order():
    _, plan = run()
    assert list(plan.decisions) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert plan.decisions[0, 2].n_recompute == (3, 3)


def test_plan_is_lazy():
    """The first op comes before later steps are decided."""
    policy = Recorder((0,))
    placement = policy.place(OPT, SMALL, BLOCKS)
    ops = drive(policy, BLOCKS, CostModel(OPT, SMALL, placement))
    next(ops)
    assert [(g, s) for g, s, _, _ in policy.asked] == [(0, 0), (0, 1)]


def test_belief_is_what_a_policy_reasons_with():
    belief = replace(SMALL, name="believed")
    seen = []

    class Curious(FixedRecompute):
        __slots__ = ()

        def decide(self, ctx):
            seen.append(ctx.hardware.name)
            return super().decide(ctx)

    planned(Curious(), Scenario(OPT, BLOCKS), belief)
    assert set(seen) == {"believed"}


@pytest.mark.parametrize(
    ("n_recompute", "slices", "message"),
    [
        ((0, 0), (1,), "2 recompute counts for 1 batches"),
        ((-1,), (1,), r"n_recompute: \(-1,\) must be >= 0"),
        ((0, 0), (0, 0), r"slices: \(0, 0\) must be >= 0 and sum to >= 1"),
        ((0, 0), (2, -1), r"slices: \(2, -1\)"),
    ],
)
def test_bad_decision(n_recompute, slices, message):
    with pytest.raises(ValueError, match=message):
        Decision(n_recompute, slices)


# ---- policies/README.md -----------------------------------------------------------------------


def test_policy_in_one_page_runs():
    """The block of the README, executed as it stands."""
    text = (Path(policies.__file__).parent / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 1
    space: dict[str, object] = {}
    exec(compile(blocks[0], "policies/README.md", "exec"), space)  # noqa: S102
    page = space["FixedRecompute"]
    assert callable(page)
    check_policy(page(7))
    plan = planned(page(7), Scenario(OPT, BLOCKS))
    assert plan.ops == planned(FixedRecompute((7,)), Scenario(OPT, BLOCKS)).ops
