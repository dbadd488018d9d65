"""Re-fitting a belief: what spans tell, what they do not, and when a new belief is adopted."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from policies.compute_fit import COMPUTE, ComputeFit, Forward
from policies.cost.model import CostModel
from policies.drive import drive, drive_steps
from policies.feedback import MARGIN, WINDOW_STEPS, Refit
from policies.placement import Shares
from policies.plan.op import LANE_OF, Attention, Kind, Op, Scope, Slot, Tier
from policies.spec.curve import Curve
from policies.spec.factors import with_factors
from policies.spec.workload import Batch, Block
from policies.tightllm import TightLLM
from policies.trace.span import Span
from sim.closed_loop import ClosedLoopBackend
from sim.executors import KeptSteps
from sim.job import WorkloadSpec
from sim.run import RunSpec, simulate
from tests.policies_table import OPT, SMALL

BLOCKS = (Block(0, (Batch(8, 512),) * 2, 8), Block(1, (Batch(8, 512),) * 2, 8))
PLACEMENT = TightLLM().place(OPT, SMALL, BLOCKS)
BELIEF = CostModel(OPT, SMALL, PLACEMENT)
PAGEABLE = Slot("home", Tier.HOST, pinned=False)

PREFILL = Op(Kind.FORWARD, 0, 0, n_seqs=8, n_new=512)
HEAD = Op(Kind.FORWARD, 0, 1, OPT.n_layers, scope=Scope.HEAD, n_seqs=8, n_new=1)
DECODE = Op(Kind.FORWARD, 0, 1, n_seqs=8, n_new=1, n_ctx=512)
TAILS = tuple(replace(DECODE, n_recompute=n) for n in (8, 64, 200))


def machine(**factors):
    return CostModel(OPT, with_factors(SMALL, factors), PLACEMENT)


def spans(costs, ops, at_s=0.0):
    """Spans of ops that run one after another."""
    for op in ops:
        seconds = costs.seconds(op)
        yield op, Span(op.key, op.kind, LANE_OF[op.kind], at_s, at_s + seconds, 0, 0.0)
        at_s += seconds


def transfers(step=0, kind=Kind.LOAD_KV, **fields):
    return [Op(kind, 0, step, i, n_seqs=8, stop=300 + 10 * i, **fields) for i in range(3)]


# ---- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.7, 1.3])
@pytest.mark.parametrize(
    ("rate", "ops"),
    [
        ("h2d", transfers()),
        ("h2d", [Op(Kind.LOAD_WEIGHT, 0, 1, 0, n_parts=4, part=i) for i in range(4)]),
        ("h2d_pageable", transfers(reads=(PAGEABLE,))),
        ("d2h", transfers(kind=Kind.STORE_KV)),
        ("d2h_pageable", transfers(kind=Kind.STORE_KV, writes=(PAGEABLE,))),
        ("disk_read", transfers(kind=Kind.READ_ACT, scope=Scope.INPUT)),
        ("disk_read", transfers(kind=Kind.READ_KV)),
        ("disk_write", transfers(kind=Kind.WRITE_KV)),
        ("host_copy", transfers(kind=Kind.HOST_COPY)),
        ("cpu_attention_bytes_per_s", transfers(kind=Kind.CPU_ATTEND, n_ctx=300, n_new=1)),
    ],
)
def test_a_link_is_what_its_copies_reach(rate, ops, factor):
    half = replace(PLACEMENT, kv=(Shares(0.0, 0.5, 0.5),) * 2)
    refit = Refit(CostModel(OPT, SMALL, half))
    plant = CostModel(OPT, with_factors(SMALL, {rate: factor}), half)
    found = refit.add(spans(plant, ops))
    assert refit.factors == pytest.approx({rate: factor})
    assert found.seconds(ops[0]) == pytest.approx(plant.seconds(ops[0]))


def test_a_stalled_copy_does_not_make_a_slow_link():
    pairs = list(spans(BELIEF, transfers()))
    op, span = pairs[1]
    pairs[1] = op, span._replace(end_s=span.end_s + 1.0)
    assert Refit(BELIEF).add(pairs) is BELIEF


def test_what_both_directions_lose_is_not_a_slow_link():
    """duplex 0.8: a load that is stored against all along takes 1.25 times as long."""
    belief = CostModel(OPT, replace(SMALL, duplex=0.8), PLACEMENT)
    (load,), (store,) = transfers()[:1], transfers(kind=Kind.STORE_KV)[:1]
    both_s = max(belief.seconds(load), belief.seconds(store)) / 0.8
    pairs = [
        (op, Span(op.key, op.kind, LANE_OF[op.kind], 0.0, both_s, 0, 0.0)) for op in (load, store)
    ]
    refit = Refit(belief)
    refit.add(pairs)
    ratio = belief.seconds(store) / belief.seconds(load)  # the shorter one really is slower
    assert refit.factors == pytest.approx({"h2d": 1 / ratio}, rel=0.02)
    blind = Refit(BELIEF)
    blind.add(pairs)
    assert blind.factors["d2h"] == pytest.approx(0.8, rel=0.02)


# ---- compute ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", COMPUTE)
def test_factors_act_as_on_the_machine_itself(rate):
    """Every kind of kernel, every limit: an error of an explanation needs no other cost model."""
    curve = Curve((1e5, 1e7), (1e11, 4e11))
    whole = replace(SMALL, layer_norm=curve, rms_norm=curve, rotary=curve,
                    attention_unfused_decode=Curve((64, 1024), (1e11, 2e11)),
                    attention_unfused_scores=Curve((64, 1024), (1e10, 2e10)))  # fmt: skip
    llama = replace(OPT, learned_positions=0, norm_bias=False, linear_bias=False, gated_ffn=True)
    front = replace(DECODE, n_recompute=9, n_front=30, n_project=40)
    ops = [PREFILL, HEAD, DECODE, *TAILS, front, replace(front, scope=Scope.ATTENTION)]
    ops += [replace(op, attention=Attention.UNFUSED) for op in ops if op.scope is Scope.LAYER]
    told = set()
    for spec in (OPT, llama):
        belief = CostModel(spec, whole, PLACEMENT)
        forwards = [Forward(op, belief.seconds(op), 1.0) for op in ops]
        assert ComputeFit(belief, forwards).error({}) == pytest.approx(0.0, abs=1e-12)
        for factor in (0.01, 100.0):
            plant = CostModel(spec, with_factors(whole, {rate: factor}), PLACEMENT)
            forwards = [Forward(op, plant.seconds(op), 1.0) for op in ops]
            fit = ComputeFit(belief, forwards)
            assert fit.error({rate: factor}) == pytest.approx(0.0, abs=1e-12)
            told.add(fit.error({}) > 1e-3)
    assert True in told


@pytest.mark.parametrize(("off", "kept"), [(1.007, True), (1.04, False)])
def test_a_belief_that_is_nearly_right_is_kept(off, kept):
    refit = Refit(BELIEF)
    refit.add(spans(machine(gemm=1 / off), [PREFILL, HEAD, *TAILS]))
    assert (not refit.factors) is kept


@pytest.mark.parametrize("factor", [0.7, 1.3])
@pytest.mark.parametrize(
    ("rate", "ops"),
    [
        ("gemm", [PREFILL, HEAD, *TAILS]),
        ("attention_decode", [PREFILL, HEAD, DECODE]),
        ("attention_prefill", [PREFILL, HEAD, *TAILS]),
        ("attention_window", [PREFILL, HEAD, *TAILS]),
    ],
)
def test_shapes_tell_which_rate_is_wrong(rate, ops, factor):
    """Also by how much, unless it hardly matters: within half a per cent of every forward."""
    plant = machine(**{rate: factor})
    fit = ComputeFit(BELIEF, [Forward(op, plant.seconds(op), 1.0) for op in ops])
    factors = fit.solve()
    assert set(factors) == {rate}
    assert factors[rate] == pytest.approx(factor, rel=0.1)
    assert fit.error(factors) < 0.005 < fit.error({})


def test_two_wrong_rates():
    plant = machine(gemm=0.8, attention_window=0.5)
    ops = [PREFILL, HEAD, *TAILS]
    fit = ComputeFit(BELIEF, [Forward(op, plant.seconds(op), 1.0) for op in ops])
    factors = fit.solve()
    assert factors == pytest.approx({"gemm": 0.8, "attention_window": 0.5}, rel=0.05)


def test_a_launch_cost_that_limits_nothing_at_first():
    """It has no gradient where the belief stands; the search over the whole range finds it."""
    short = replace(DECODE, n_seqs=1, n_ctx=4)
    plant = machine(launch_s=3.0)
    assert machine(launch_s=1.01).seconds(short) == BELIEF.seconds(short) < plant.seconds(short)
    fit = ComputeFit(BELIEF, [Forward(op, plant.seconds(op), 1.0) for op in (short, PREFILL)])
    assert fit.solve() == pytest.approx({"launch_s": 3.0}, rel=0.05)


def test_one_shape_gives_one_common_factor():
    plant = machine(gemm=0.7)
    refit = Refit(BELIEF)
    found = refit.add(spans(plant, [TAILS[2]]))
    rates = {n for n in refit.factors if n != "launch_s"}
    assert {"gemm", "attention_decode", "attention_window", "hbm_bytes_per_s"} <= rates
    assert len({refit.factors[n] for n in rates}) == 1
    assert found.seconds(TAILS[2]) == pytest.approx(plant.seconds(TAILS[2]), rel=0.005)


def test_unfused_attention():
    op = replace(TAILS[1], attention=Attention.UNFUSED)
    plant = machine(hbm_bytes_per_s=0.5)
    found = Refit(BELIEF).add(spans(plant, [replace(PREFILL, step=1), op, HEAD]))
    assert found.seconds(op) == pytest.approx(plant.seconds(op), rel=0.01)


# ---- when it is adopted -------------------------------------------------------------------------


def test_a_right_belief_is_kept():
    ops = [*transfers(), *transfers(kind=Kind.STORE_KV), PREFILL, HEAD, *TAILS]
    refit = Refit(BELIEF)
    assert refit.add(spans(BELIEF, ops)) is BELIEF
    assert refit.add(()) is BELIEF
    assert refit.factors == {}


@pytest.mark.parametrize("sign", [1, -1])
def test_small_changes_are_not_adopted(sign):
    assert Refit(BELIEF).add(spans(machine(h2d=1 + sign * 0.9 * MARGIN), transfers())) is BELIEF
    refit = Refit(BELIEF)
    refit.add(spans(machine(h2d=1 + sign * 1.1 * MARGIN), transfers()))
    assert refit.factors["h2d"] == pytest.approx(1 + sign * 1.1 * MARGIN)


def test_factors_do_not_compound():
    refit = Refit(BELIEF)
    plant = machine(h2d=0.7, gemm=0.8)
    for step in range(4):
        refit.add(spans(plant, [*transfers(step), replace(PREFILL, step=step)]))
    assert refit.factors["h2d"] == pytest.approx(0.7)


def test_turning_back_doubles_the_margin():
    """A link that is fast and slow in turns, each for so long that the window sees nothing else."""
    refit, adopted = Refit(BELIEF), []
    for turn in range(8):
        before = refit.belief
        for step in range(WINDOW_STEPS):
            plant = machine(h2d=1.2 if turn % 2 else 1.0)
            refit.add(spans(plant, transfers(WINDOW_STEPS * turn + step)))
        adopted.append(refit.belief is not before)
    assert adopted[1:3] == [True, True]
    assert not any(adopted[5:])


def test_a_change_shows_within_the_window():
    refit = Refit(BELIEF)
    refit.add(spans(BELIEF, transfers(0)))
    for step in range(1, 1 + WINDOW_STEPS):
        refit.add(spans(machine(h2d=0.5), transfers(step)))
    assert refit.factors == pytest.approx({"h2d": 0.5})


def test_a_fence_tells_nothing():
    assert Refit(BELIEF).add(spans(machine(sync_s=9.0), [Op(Kind.FENCE, 0, 0)])) is BELIEF


# ---- factors of a profile -----------------------------------------------------------------------


def test_with_factors():
    scaled = with_factors(SMALL, {"h2d": 2.0, "gemm": 0.5, "attention_window": 3.0, "launch_s": 4})
    assert (scaled.h2d.bytes_per_s, scaled.h2d.latency_s) == (24e9, 1e-5)
    assert scaled.gemm(32) == 0.5 * SMALL.gemm(32)
    assert scaled.attention_window(20, 500) == pytest.approx(3 * SMALL.attention_window(20, 500))
    assert scaled.launch_s == 4e-5
    assert with_factors(SMALL, {"attention_unfused_decode": 2.0, "h2d": 1.0}) is SMALL
    with pytest.raises(ValueError, match=r"factors\.h2d: 0\.0 must be positive"):
        with_factors(SMALL, {"h2d": 0.0})


# ---- runs ---------------------------------------------------------------------------------------

CLOSED = TightLLM(solver="dp", feedback=True)
SPEC = RunSpec(OPT, SMALL, CLOSED, WorkloadSpec("fixed", "fixed", 3, 16, prompt_len=200, gen_len=8))


def test_a_run_with_feedback_takes_simpy():
    closed, opened = simulate(SPEC), simulate(replace(SPEC, policy=TightLLM(solver="dp")))
    assert (closed.record.engine, opened.record.engine) == ("simpy", "fast")
    assert list(closed.decisions) == list(opened.decisions)
    assert closed.record.makespan_s == pytest.approx(opened.record.makespan_s, rel=1e-9)
    assert (closed.record.feedback, closed.record.feedback_belief_changes) == (True, 0)
    assert (opened.record.feedback, opened.record.feedback_belief_changes) == (False, None)


def test_the_record_counts_the_beliefs_that_decided():
    wrong = replace(SMALL, h2d=replace(SMALL.h2d, bytes_per_s=2e9))
    record = simulate(replace(SPEC, belief=wrong)).record
    assert record.feedback_belief_changes >= 1
    assert "feedback_belief_changes" in record.as_row()
    short = replace(SPEC, belief=wrong, workload=replace(SPEC.workload, gen_len=1))
    assert simulate(short).record.feedback_belief_changes == 0


def test_feedback_goes_on_from_block_to_block():
    """What a first block showed holds in the second from its first decode step on."""
    slow = replace(SMALL, h2d=replace(SMALL.h2d, bytes_per_s=2e9))
    blocks = tuple(Block(i, (Batch(64, 600),) * 2, 6) for i in range(2))
    placement = CLOSED.place(OPT, slow, blocks)
    plant, belief = CostModel(OPT, slow, placement), CostModel(OPT, SMALL, placement)
    right, found = {}, {}
    list(drive(CLOSED, blocks, plant, lambda b, s, d: right.update({(b, s): d})))
    backend = ClosedLoopBackend(plant)
    steps = drive_steps(
        CLOSED, blocks, belief, lambda b, s, d: found.update({(b, s): d}), backend.ended
    )
    for block in blocks:
        backend.run(islice(steps, block.max_new))
    wrong = [where for where in right if found[where].n_recompute != right[where].n_recompute]
    assert wrong == [(0, 1), (0, 2)]


def test_what_must_know_a_plan_before_it_runs_refuses():
    with pytest.raises(ValueError, match=r"policy\.feedback: true needs engine=simpy or auto"):
        replace(SPEC, engine="fast")
    with pytest.raises(ValueError, match=r"policy\.feedback: true needs engine=simpy or auto"):
        KeptSteps(CLOSED)
