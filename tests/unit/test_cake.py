"""Cake: where the two ends meet, and what it does not look at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.cake import Cake
from policies.plan.op import Kind, Op
from policies.tightllm import TightLLM
from policies.trace.metrics import metrics
from sim.engine import SimBackend
from tests.policies_table import (
    GQA,
    MOE,
    OPT,
    RAGGED,
    SMALL,
    FixedRecompute,
    Scenario,
    case,
    one_block,
    planned,
)

# Batches large enough that recomputing costs arithmetic, on a GPU fast enough for it to pay.
QUICK = replace(SMALL, gpu_bytes=256e9, h2d=replace(SMALL.h2d, bytes_per_s=4e9))
BLOCKS = one_block(n_batches=3, n_seqs=32, prompt_len=600, max_new=4)


def ends(plan, front: int, step: int = 1) -> tuple[float, float]:
    """Seconds of one layer: to compute the first ``front`` tokens, and to load the others."""
    compute_s = load_s = 0.0
    for batch in plan.blocks[0].batches:
        n_ctx = batch.prompt_len + step - 1
        op = Op(Kind.FORWARD, 0, step, n_seqs=batch.n_seqs, n_new=1, n_ctx=n_ctx)
        again = replace(op, n_front=min(front, n_ctx))
        compute_s += plan.costs.seconds(again) - plan.costs.seconds(op)
        left = replace(op, kind=Kind.LOAD_KV, start=min(front, n_ctx), stop=n_ctx)
        load_s += plan.costs.seconds(left)
    return compute_s, load_s


@pytest.mark.parametrize("chunk", [1, 32, 250])
@pytest.mark.parametrize("blocks", [BLOCKS, RAGGED[:1]], ids=["alike", "ragged"])
@pytest.mark.parametrize("model", [OPT, GQA])
def test_ends_meet(chunk, blocks, model):
    """The last chunk that is computed ends in time, and the one after it would not."""
    plan = planned(Cake(chunk_tokens=chunk), Scenario(model, blocks, QUICK))
    longest = max(batch.prompt_len for batch in blocks[0].batches)
    decided = plan.decisions[0, 1]
    front = max(decided.n_front)
    assert front % chunk == 0 or front == longest
    compute_s, load_s = ends(plan, front)
    assert compute_s <= load_s
    if front < longest:
        compute_s, load_s = ends(plan, front + chunk)
        assert compute_s > load_s


def test_some_are_computed_and_some_are_loaded():
    plan = planned(Cake(), Scenario(OPT, BLOCKS, QUICK))
    assert 0 < plan.decisions[0, 1].n_front[0] < 600


def test_the_front_is_the_same_for_all_batches_and_never_longer_than_the_context():
    plan = planned(Cake(), Scenario(OPT, RAGGED, QUICK))
    for (block, step), decision in plan.decisions.items():
        batches = plan.blocks[block].batches
        contexts = [batch.prompt_len + step - 1 if step else 0 for batch in batches]
        most = max(decision.n_front)
        assert decision.n_front == tuple(min(most, n) for n in contexts)
        assert not any(decision.n_recompute)


def test_all_kv_is_stored():
    """So the front of a step does not bind the next."""
    plan = case("cake", "long")
    for batch in range(3):
        stored = [(op.start, op.stop) for op in plan.ops
                  if op.kind is Kind.STORE_KV and op.batch == batch and op.layer == 0]  # fmt: skip
        assert stored[0] == (0, 1000)
        assert stored[1:] == [(1000 + i, 1001 + i) for i in range(len(stored) - 1)]
        assert len(stored) == 7


def test_it_does_not_look_at_weights():
    """Resident or on the link: the ends meet in the same place."""
    scenario = Scenario(OPT, BLOCKS, QUICK)
    here, away = planned(Cake(placement="auto"), scenario), planned(Cake(), scenario)
    assert here.placement.weights != away.placement.weights
    assert [d.n_front for d in here.decisions.values()] == [
        d.n_front for d in away.decisions.values()
    ]


def test_a_front_is_cheaper_than_a_tail():
    costs = case("cake", "long").costs
    op = Op(Kind.FORWARD, 0, 1, n_seqs=64, n_new=1, n_ctx=1000)
    assert costs.seconds(replace(op, n_front=400)) < costs.seconds(replace(op, n_recompute=400))


@pytest.mark.parametrize("model", [OPT, MOE], ids=["dense", "moe"])
def test_with_resident_weights_it_is_faster_than_loading_all(model):
    scenario = Scenario(replace(model, n_layers=8), BLOCKS, QUICK)
    loads = TightLLM(distributor=False, loader=False, placement="auto", solver="dp")
    seconds = [
        metrics(SimBackend(plan.costs).run(plan.ops)).decode_s
        for plan in (planned(policy, scenario) for policy in (Cake(placement="auto"), loads))
    ]
    assert seconds[0] < (0.9 if model is OPT else 1.0) * seconds[1]


def test_where_computing_never_ends_in_time_all_is_loaded():
    """A chunk that takes longer than the whole load is not begun."""
    slow = replace(QUICK, gemm=replace(QUICK.gemm, y=tuple(y / 1e4 for y in QUICK.gemm.y)))
    plan = planned(Cake(), Scenario(OPT, BLOCKS, slow))
    same = planned(FixedRecompute((0,)), Scenario(OPT, BLOCKS, slow))
    assert not any(any(decision.n_front) for decision in plan.decisions.values())
    moves = [[op.key for op in p.ops if op.kind is Kind.LOAD_KV] for p in (plan, same)]
    assert moves[0] == moves[1]


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"policy\.chunk_tokens: 0 must be >= 1"):
        Cake(chunk_tokens=0)
