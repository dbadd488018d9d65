"""FlexGen by hand: a slot ends when its slowest lane does, and a layer is the sum of its slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.flexgen import FlexGen
from policies.plan.op import Kind, Lane, Scope
from policies.spec.workload import Batch, Block
from policies.trace.span import parse_key
from sim.engine import SimBackend
from tests.policies_table import CASES, OPT, SMALL, Scenario, case, planned

PINNED = FlexGen(kv_pinned=True)


@pytest.mark.parametrize(
    "scenario", [s for p, s in CASES if p == "flexgen-pinned" and "disk" not in s]
)
def test_between_fences_the_longest_lane(scenario):
    """All ops of a slot are independent: its time is the largest lane total, then a sync."""
    plan = case("flexgen-pinned", scenario)
    spans = SimBackend(plan.costs).run(plan.ops).spans
    lanes = dict.fromkeys(Lane, 0.0)
    before_s = 0.0
    n_fences = 0
    for op, span in zip(plan.ops, spans, strict=True):
        if op.kind is not Kind.FENCE:
            lanes[op.lane] += plan.costs.seconds(op)
            continue
        n_fences += 1
        assert span.start_s - before_s == pytest.approx(max(lanes.values()), rel=1e-9, abs=1e-12)
        assert span.end_s - span.start_s == pytest.approx(SMALL.sync_s, rel=1e-6)
        before_s, lanes = span.end_s, dict.fromkeys(Lane, 0.0)
    assert n_fences > 3


@pytest.mark.parametrize("prompt_len", [1, 300, 2000])
def test_decode_layer_by_hand(prompt_len):
    """Where each transfer of a layer moves, slot by slot.

    Slot 0 of each half layer moves the other half's weights. Attention slots move the KV of the
    next batch; the last MLP slot moves that of the next layer's first.
    """
    n_batches, n_seqs, step = 3, 24, 2
    blocks = (Block(0, (Batch(n_seqs, prompt_len),) * n_batches, 4),)
    plan = planned(PINNED, Scenario(OPT, blocks, replace(SMALL, gpu_bytes=64e9)))
    spans = SimBackend(plan.costs).run(plan.ops).spans
    n_ctx = prompt_len + step - 1

    def copy_s(nbytes: float) -> float:
        return SMALL.h2d.latency_s + nbytes / SMALL.h2d.bytes_per_s

    kv_s = copy_s(n_seqs * n_ctx * 2 * OPT.d_model * 2)
    weights_s = {scope: copy_s(OPT.layer_bytes(1, scope)) for scope in (Scope.ATTENTION, Scope.MLP)}
    one = {
        op.scope: plan.costs.forward_seconds(op)
        for op in plan.ops
        if op.kind is Kind.FORWARD and (op.step, op.layer, op.batch) == (step, 1, 0)
    }
    total_s = 2 * n_batches * SMALL.sync_s
    for k in range(n_batches):
        first, last = k == 0, k == n_batches - 1
        attention_s = (weights_s[Scope.MLP] if first else 0.0) + (0.0 if last else kv_s)
        mlp_s = (weights_s[Scope.ATTENTION] if first else 0.0) + (kv_s if last else 0.0)
        total_s += max(attention_s, one[Scope.ATTENTION]) + max(mlp_s, one[Scope.MLP])
    ends = {
        parse_key(span.key).layer: span.end_s
        for span in spans
        if span.kind is Kind.FENCE and parse_key(span.key).step == step
    }
    assert ends[1] - ends[0] == pytest.approx(total_s, rel=1e-9)


@pytest.mark.parametrize("rate", [1.0, 0.02], ids=["compute is short", "compute is long"])
def test_prefill_serial_and_overlapped(rate):
    """n layers of load L and forward F: n (L + F) in turn; n max(L, F) + min(L, F) overlapped."""
    gemm = replace(SMALL.gemm, y=tuple(y * rate for y in SMALL.gemm.y))
    n = 5
    scenario = Scenario(
        replace(OPT, n_layers=n), (Block(0, (Batch(8, 128),), 1),), replace(SMALL, gemm=gemm)
    )
    whole = {"kv_pinned": True, "sep_layer": False, "attention": "fused"}
    fenced, free = (planned(FlexGen(**whole, fence=fence), scenario) for fence in (True, False))
    op = next(op for op in free.ops if op.kind is Kind.FORWARD)
    load = next(op for op in free.ops if op.kind is Kind.LOAD_WEIGHT)
    forward_s, load_s = free.costs.seconds(op), free.costs.seconds(load)
    assert (forward_s > load_s) == (rate < 1)
    head = next(op for op in free.ops if op.layer == n and op.kind is Kind.FORWARD)
    edge_s = free.costs.seconds(head) + SMALL.sync_s
    overlapped_s = n * max(load_s, forward_s) + min(load_s, forward_s) + edge_s
    assert SimBackend(free.costs).run(free.ops).makespan_s == pytest.approx(overlapped_s, rel=1e-9)
    # With fences the first load is alone, then each slot is a maximum, and the last only computes.
    slots_s = load_s + (n - 1) * max(load_s, forward_s) + forward_s + edge_s
    syncs_s = (1 + n + 1) * SMALL.sync_s
    assert SimBackend(fenced.costs).run(fenced.ops).makespan_s == pytest.approx(
        slots_s + syncs_s, rel=1e-9
    )
    # In turn: one slot for all weights, so each load waits for the forward before it.
    slot = load.writes
    loads = [replace(o, writes=slot) for o in free.ops if o.kind is Kind.LOAD_WEIGHT]
    others = [o for o in free.ops if o.kind is not Kind.LOAD_WEIGHT]
    layers = [replace(o, reads=(*slot, *o.reads[1:])) for o in others[:n]]
    in_turn = [o for pair in zip(loads, layers, strict=True) for o in pair] + others[n:]
    serial_s = n * (load_s + forward_s) + edge_s
    assert SimBackend(free.costs).run(in_turn).makespan_s == pytest.approx(serial_s, rel=1e-9)
