"""L5: the slot that a forward reads holds all of its layer's weights, whoever carried the pieces.

That the plans of all policies keep it is tested with L4.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from policies.errors import PlanError
from policies.plan.check import checked
from policies.plan.op import Kind, Scope
from tests.policies_table import CASES, POLICIES, Planned, case


@pytest.mark.parametrize("scenario", ["opt", "moe", "mla", "ragged", "weights-on-disk"])
def test_every_streamed_byte_is_loaded_once_a_step(scenario):
    """Independent of slots: per step and layer, loads sum to what is not on the GPU."""
    for policy in POLICIES:
        if (policy, scenario) not in CASES:
            continue
        plan = case(policy, scenario)
        moved: Counter[tuple[int, int, int]] = Counter()
        for op in plan.ops:
            if op.kind is Kind.LOAD_WEIGHT:
                moved[op.block, op.step, op.layer] += plan.costs.nbytes(op)
        layers = range(plan.model.n_layers)
        streamed = [plan.placement.streamed_bytes(plan.model, i, Scope.LAYER) for i in layers]
        for block in plan.blocks:
            times = len(block.batches) if policy.startswith("accelerate") else 1
            for step in range(block.max_new):
                found = [moved[block.index, step, i] for i in layers]
                # Attention and MLP apart may round differently from the layer.
                for have, want in zip(found, streamed, strict=True):
                    assert abs(have - times * want) <= 2, (policy, step)


def check(plan: Planned, ops) -> None:
    list(checked(ops, plan.model, plan.placement, plan.blocks))


def loads(plan: Planned, step: int) -> list[int]:
    return [i for i, op in enumerate(plan.ops) if (op.kind, op.step) == (Kind.LOAD_WEIGHT, step)]


@pytest.mark.parametrize("policy", ["accelerate", "flexgen", "tightllm-dp"])
def test_lost_piece_is_named(policy):
    plan = case(policy, "long")
    for i in (loads(plan, 0)[0], loads(plan, 1)[-1]):
        with pytest.raises(PlanError, match=r"L5 weight coverage|written before") as caught:
            check(plan, [*plan.ops[:i], *plan.ops[i + 1 :]])
        assert caught.value.key.startswith("forward/")


def test_slot_reused_too_early_is_named():
    """The next layer's weights on top of those that the later batches still need."""
    plan = case("flexgen-whole-layers", "opt")
    used = plan.ops[loads(plan, 0)[0]].writes
    i = loads(plan, 0)[1]
    ops = [*plan.ops[:i], replace(plan.ops[i], writes=used), *plan.ops[i + 1 :]]
    with pytest.raises(PlanError, match="L5 weight coverage") as caught:
        check(plan, ops)
    assert caught.value.key == "forward/g0/s0/l0/b0/p0"


def test_weights_of_another_block_do_not_count():
    plan = case("flexgen-whole-layers", "ragged")
    gone = [i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD_WEIGHT and op.block == 1]
    ops = [op for i, op in enumerate(plan.ops) if i not in gone]
    with pytest.raises(PlanError, match="L5 weight coverage") as caught:
        check(plan, ops)
    assert caught.value.key == "forward/g1/s0/l0/b0/p0"


def test_weights_on_disk_must_be_read():
    plan = case("tightllm-neither", "weights-on-disk")
    ops = [
        replace(op, reads=tuple(s for s in op.reads if "staging" not in s.name))
        for op in plan.ops
        if op.kind is not Kind.READ_WEIGHT
    ]
    with pytest.raises(PlanError, match="L5 weight coverage") as caught:
        check(plan, ops)
    assert caught.value.key.startswith("load_weight/")
