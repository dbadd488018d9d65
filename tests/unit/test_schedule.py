"""The zig-zag schedule, op by op, on a block of two layers and two batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from policies.drive import Decision
from policies.flexgen import FlexGen
from policies.plan.op import Attention, Kind, Op
from policies.spec.workload import Batch, Block
from policies.step_ops import Zigzag
from tests.policies_table import OPT, FixedRecompute, Planned, Scenario, planned

TWO = replace(OPT, n_layers=2)
SHORT = {Kind.LOAD_WEIGHT: "W", Kind.LOAD_KV: "L", Kind.STORE_KV: "S", Kind.FORWARD: "F"}


def job(n_batches: int = 2, max_new: int = 3) -> Scenario:
    return Scenario(TWO, (Block(0, (Batch(4, 10),) * n_batches, max_new),))


def spelled(plan: Planned, step: int) -> str:
    """Ops emitted for a step in program order, as kind, layer, batch; F2 is the LM head."""
    ops = [op for op in plan.ops if op.step == step and op.kind in SHORT]
    return " ".join(f"{SHORT[op.kind]}{op.layer}{op.batch}" for op in ops)


def test_order_of_a_decode_step():
    """Weights of the next layer, KV of the next batch, the last batch's store, then compute."""
    plan = planned(FixedRecompute((0,)), job())
    assert spelled(plan, 1) == (
        "W00 W01 L00 "  # emitted behind the LM head of step 0
        "W10 L01 F00 W11 L10 S00 F01 L11 S01 F10 S10 F11 S11 F20 F21"
    )


def test_last_step_stores_and_fetches_nothing():
    assert spelled(planned(FixedRecompute((0,)), job()), 2) == (
        "W00 W01 L00 W10 L01 F00 W11 L10 F01 L11 F10 F11 F20 F21"
    )


def test_prefill_loads_its_first_layer_up_front():
    assert spelled(planned(FixedRecompute((0,)), job()), 0) == (
        "W00 W00 W10 F00 W11 S00 F01 S01 F10 S10 F11 S11 F20 F21"
    )


def test_slots_alternate():
    plan = planned(FixedRecompute((0,)), job(max_new=4))
    loads = [op for op in plan.ops if op.kind is Kind.LOAD_KV]
    assert {op.writes[0].name for op in loads} == {"gpu/kv in/0", "gpu/kv in/1"}
    assert all(before.writes != after.writes for before, after in pairwise(loads))
    weights = [op for op in plan.ops if op.kind is Kind.LOAD_WEIGHT]
    assert {op.writes[0].name for op in weights} == {"gpu/weight slot/0", "gpu/weight slot/1"}
    for before, after in pairwise(weights):  # the pieces of one layer share a slot
        assert (before.writes == after.writes) == (before.layer == after.layer)


def test_sep_layer_cuts_a_layer_in_two():
    plan = planned(FlexGen(kv_pinned=True, fence=False), job())
    scopes = [op.scope.value for op in plan.ops if op.kind is Kind.FORWARD and op.step == 1]
    assert (
        scopes == ["attention"] * 2 + ["mlp"] * 2 + ["attention"] * 2 + ["mlp"] * 2 + ["head"] * 2
    )


def test_fence_after_every_slot():
    plan = planned(FlexGen(kv_pinned=True), job(max_new=2))
    kinds = [op.kind for op in plan.ops]
    # Two steps of two halves of two layers and the head, two batches each; the first load; the end.
    assert kinds.count(Kind.FENCE) == 2 * (2 * 2 + 1) * 2 + 2
    for before, after in pairwise(kinds):
        assert not before is after is Kind.FORWARD


def test_pageable_kv_goes_through_a_relay_in_halves():
    plan = planned(FlexGen(), job())
    loads = [op for op in plan.ops if op.kind in (Kind.HOST_COPY, Kind.LOAD_KV) and op.step == 1
             and (op.layer, op.batch) == (1, 0)]  # fmt: skip
    assert [(op.kind, op.part) for op in loads] == [
        (Kind.HOST_COPY, 0), (Kind.LOAD_KV, 0), (Kind.HOST_COPY, 1), (Kind.LOAD_KV, 1),
    ]  # fmt: skip
    assert sum(plan.costs.nbytes(op) for op in loads[::2]) == 4 * 10 * 2 * OPT.d_model * 2
    home = next(slot for slot in loads[0].reads if slot.name.startswith("host/kv/"))
    assert not home.pinned
    assert all(slot.pinned for slot in loads[1].reads)
    # The host copy runs on the thread that issues work, so the next forward waits for it.
    forward = next(op for op in plan.ops if op.kind is Kind.FORWARD and op.step == 1)
    assert set(loads[0].writes) & set(forward.reads)


def test_cpu_attention_moves_queries_and_outputs_only():
    plan = planned(FlexGen(attention="cpu"), job())
    kinds = [op.kind for op in plan.ops if op.step == 1]
    assert Kind.LOAD_KV not in kinds
    assert kinds.count(Kind.CPU_ATTEND) == 4
    prefill = {op.attention for op in plan.ops if op.kind is Kind.FORWARD and op.step == 0}
    assert Attention.CPU not in prefill


def test_resident_layers_are_not_loaded():
    policy = FlexGen(percent=(100, 0, 0, 100, 100, 0), kv_pinned=True)
    plan = planned(policy, job())
    assert not [op for op in plan.ops if op.kind is Kind.LOAD_WEIGHT]
    partly = planned(FlexGen(percent=(20, 80, 0, 100, 100, 0), kv_pinned=True), job())
    forward = next(op for op in partly.ops if op.kind is Kind.FORWARD)
    assert {s.name for s in forward.reads} >= {"gpu/weight slot/0", "gpu/weights/l0"}


def test_activations_on_the_host_move_around_every_stage():
    policy = FlexGen(percent=(0, 100, 0, 100, 0, 100), kv_pinned=True, sep_layer=False)
    ops = [op for op in planned(policy, job()).ops if op.step == 0]
    acts = [op for op in ops if op.kind in (Kind.LOAD_ACT, Kind.STORE_ACT)]
    assert [(op.kind, op.layer, op.batch) for op in acts] == [
        (Kind.STORE_ACT, 0, 0), (Kind.STORE_ACT, 0, 1),
        (Kind.LOAD_ACT, 1, 0), (Kind.LOAD_ACT, 1, 1),
    ]  # fmt: skip
    assert all((op.n_seqs, op.start, op.stop) == (4, 0, 10) for op in acts)


def test_slices_follow_the_decision():
    @staticmethod
    def decide(ctx):
        return Decision((0,) * ctx.n_batches, (1, 3))

    class Sliced(FixedRecompute):
        __slots__ = ()

    Sliced.decide = decide
    plan = planned(Sliced(), job())
    carried = [(op.batch, op.part, op.n_parts) for op in plan.ops
               if op.kind is Kind.LOAD_WEIGHT and (op.step, op.layer) == (1, 1)]  # fmt: skip
    assert carried == [(0, 0, 4), (1, 1, 4), (1, 2, 4), (1, 3, 4)]


def test_cpu_attention_needs_separate_layers():
    with pytest.raises(ValueError, match="cpu needs sep_layer"):
        Zigzag(attention=Attention.CPU)
    with pytest.raises(ValueError, match=r"policy\.sep_layer: false must be true"):
        FlexGen(attention="cpu", sep_layer=False)
    with pytest.raises(ValueError, match=r"policy\.percent: 50 % of the KV on the GPU must be 0"):
        FlexGen(attention="cpu", percent=(0, 100, 50, 50, 100, 0))


def test_key_is_stable():
    keys = [op.key for op in planned(FixedRecompute((0,)), job()).ops]
    assert keys[0] == Op(Kind.LOAD_WEIGHT, 0, 0).key == "load_weight/g0/s0/l0/b0/p0"
    assert len(set(keys)) == len(keys)
