"""Accelerate by hand: nothing overlaps, so the makespan is a sum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.accelerate import Accelerate
from policies.plan.op import Kind, Scope
from policies.spec.workload import Batch, Block
from sim.engine import SimBackend
from tests.policies_table import GQA, MOE, OPT, SMALL, Scenario, planned

BLOCKS = (Block(0, (Batch(16, 200), Batch(16, 120), Batch(3, 120)), 4),)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("model", [OPT, GQA, MOE], ids=lambda model: model.name)
def test_makespan_is_the_sum_of_loads_and_forwards(model, pinned):
    """Over batches, steps and modules: latency + bytes / rate + forward; syncs end the blocks."""
    plan = planned(Accelerate(pinned=pinned), Scenario(model, BLOCKS))
    link = SMALL.h2d if pinned else SMALL.h2d_pageable
    forwards = {
        (op.block, op.step, op.layer, op.scope): plan.costs.forward_seconds(op)
        for op in plan.ops
        if op.kind is Kind.FORWARD
    }
    total_s = 0.0
    for block in range(3):
        for step in range(4):
            for layer in range(model.n_layers):
                for scope in (Scope.ATTENTION, Scope.MLP):
                    nbytes = model.layer_bytes(layer, scope)
                    total_s += link.latency_s + nbytes / link.bytes_per_s
                    total_s += forwards[block, step, layer, scope]
            total_s += forwards[block, step, model.n_layers, Scope.HEAD]
        total_s += SMALL.sync_s
    makespan_s = SimBackend(plan.costs).run(plan.ops).makespan_s
    assert makespan_s == pytest.approx(total_s, rel=1e-9)


def test_big_batch_loads_once():
    """Merging three batches saves two of three loads and nothing else in the limit."""
    uniform = (Block(0, (Batch(8, 100),) * 3, 3),)
    seq = planned(Accelerate(batches="seq"), Scenario(OPT, uniform))
    big = planned(Accelerate(batches="big"), Scenario(OPT, uniform))
    loads = [sum(op.kind is Kind.LOAD_WEIGHT for op in plan.ops) for plan in (seq, big)]
    assert loads == [3 * 3 * OPT.n_layers * 2, 3 * OPT.n_layers * 2]


def test_a_resident_layer_is_not_loaded():
    policy = replace(Accelerate(), placement="auto")
    plan = planned(policy, Scenario(OPT, BLOCKS))
    assert not [op for op in plan.ops if op.kind is Kind.LOAD_WEIGHT]
