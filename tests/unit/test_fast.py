"""The compiled executor from outside: what runs where, equal records and traces, bad input."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sim.run
from policies.drive import Decision, drive
from policies.flexgen import FlexGen
from policies.placement import ON_HOST, Placement
from policies.plan.op import Kind, Lane, Op, Slot, Tier
from policies.spec.workload import Batch, Block
from policies.trace.decisions import StepDecision
from policies.trace.span import parse_key
from sim.assembly import plain_template
from sim.decisions import DecisionLog
from sim.engine import SimBackend
from sim.fast import NARROWEST, FastBackend, run_program
from sim.job import WorkloadSpec
from sim.kernel import find_led
from sim.program import Programs
from sim.run import RunSpec, simulate
from sim.template import Families
from sim.tracing import UntraceableError
from tests.laws.test_l13_compiled import Taken
from tests.policies_table import (
    OPT,
    POLICIES,
    SMALL,
    FixedRecompute,
    Scenario,
    one_block,
    planned,
)
from tests.strategies import TableCosts

ROOT = Path(__file__).parents[2]
JOB = WorkloadSpec("sample", "sharegpt", 2, 4, limit=20, max_new=6, reject_long=True)
SPEC = RunSpec(OPT, replace(SMALL, duplex=0.8, gpu_bytes=64e9), FlexGen(), JOB)
LOAD, FORWARD = Op(Kind.LOAD_KV, 0, 0), Op(Kind.FORWARD, 0, 0)


def run(seconds, duplex=1.0):
    costs = TableCosts({op.key: s for op, s in seconds.items()}, {})
    return [(span.start_s, span.end_s) for span in FastBackend(costs, duplex).run(seconds).spans]


def both(spec):
    return (simulate(replace(spec, engine=engine)) for engine in ("simpy", "fast"))


# ---- one plan -----------------------------------------------------------------------------------


def test_copies_of_different_length_by_hand():
    """f = 0.8. Both until the 4 s store ends at 5; the load has done 4 of 10 s, ends at 11."""
    times = run({LOAD: 10.0, Op(Kind.STORE_KV, 0, 0): 4.0}, 0.8)
    assert times == [pytest.approx((0, 11)), pytest.approx((0, 5))]


def test_head_of_line_blocking():
    slot = Slot("buffer", Tier.GPU)
    reader = replace(FORWARD, reads=(slot,))
    blocked, behind = replace(LOAD, layer=1, writes=(slot,)), replace(LOAD, layer=2)
    assert run({reader: 3.0, blocked: 1.0, behind: 1.0}) == [(0, 3), (3, 4), (4, 5)]


@pytest.mark.parametrize("duplex", [0.0, 1.1, float("nan")])
def test_duplex_out_of_range(duplex):
    with pytest.raises(ValueError, match=r"duplex: .* must be in \(0, 1\]"):
        run({LOAD: 1.0}, duplex)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_cost_that_is_no_time(seconds):
    with pytest.raises(ValueError, match=r"seconds: .* load_kv/g0/s0/l0/b0/p0, must be finite"):
        run({LOAD: seconds})


# ---- a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flexgen", "tightllm-dp", "accelerate", "recompute-changing"])
def test_records_are_equal(name):
    simpy, fast = (result.record for result in both(replace(SPEC, policy=POLICIES[name])))
    assert (simpy.engine, fast.engine) == ("simpy", "fast")
    assert fast.status == "ok"
    for column, value in simpy.as_row().items():
        if column not in ("engine", "solve_s"):
            other = getattr(fast, column)
            close = pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value
            assert other == close, column


@pytest.mark.parametrize("mode", ["full", "auto", "none"])
@pytest.mark.parametrize("limit", [200_000, 500, 50])
def test_traces_are_equal(monkeypatch, mode, limit):
    """The limit lies above the run, between its blocks, within its first block."""
    monkeypatch.setattr(sim.run, "AUTO_TRACE_OPS", limit)
    simpy, fast = both(replace(SPEC, trace=mode))
    assert simpy.record.trace == fast.record.trace
    assert [span.key for span in simpy.spans] == [span.key for span in fast.spans]
    for one, two in zip(simpy.spans, fast.spans, strict=True):
        assert (two.start_s, two.end_s) == pytest.approx((one.start_s, one.end_s), rel=1e-9)
    if fast.record.trace == "first steps":
        assert {parse_key(span.key).step for span in fast.spans} == {0, 1, 2}
        assert {parse_key(span.key).block for span in fast.spans} == {0}


def test_belief_and_plant_stay_apart():
    slow = replace(SMALL, h2d=replace(SMALL.h2d, bytes_per_s=1e9))
    spec = replace(SPEC, policy=POLICIES["tightllm-dp"], belief=slow)
    simpy, fast = both(spec)
    assert list(simpy.decisions) == list(fast.decisions)
    assert fast.record.makespan_s == pytest.approx(simpy.record.makespan_s, rel=1e-9)


class Squared(FixedRecompute):
    """Computes with a number as no affine form can."""

    def step(self, ctx, now, then):
        yield from super().step(ctx, now, then)
        yield from range(ctx.step**2 * 0)


def test_auto_takes_simpy_for_a_policy_that_cannot_be_traced():
    spec = replace(SPEC, policy=Squared())
    assert simulate(SPEC).record.engine == "fast"
    assert simulate(spec).record.engine == "simpy"
    assert list(simulate(spec).decisions) == list(
        simulate(replace(SPEC, policy=FixedRecompute())).decisions
    )
    with pytest.raises(UntraceableError, match="fixed-recompute"):
        simulate(replace(spec, engine="fast"))


def test_unknown_engine():
    with pytest.raises(ValueError, match=r"engine: 'slow' is none of auto, simpy, fast"):
        replace(SPEC, engine="slow")


def test_the_compiler_is_loaded_only_to_compile():
    code = "import sys, sim.run; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- decisions ----------------------------------------------------------------------------------


def test_decisions_are_kept_as_runs_and_read_as_rows():
    blocks = (Block(0, (Batch(2, 10), Batch(1, 8)), 4), Block(1, (Batch(1, 5),), 1))
    log = DecisionLog(blocks)
    for step, tails in enumerate([(0, 0), (3, 0), (3, 0), (4, 1)]):
        log.observe(0, step, Decision(tails, (1, 2), "dp", 0.5 if step == 1 else 0.0))
    log.observe(1, 0, Decision((0,), (1,)))
    rows = [
        (0, 0, 0, 0, 0, 1), (0, 0, 1, 0, 0, 2), (0, 1, 0, 10, 3, 1), (0, 1, 1, 8, 0, 2),
        (0, 2, 0, 11, 3, 1), (0, 2, 1, 9, 0, 2), (0, 3, 0, 12, 4, 1), (0, 3, 1, 10, 1, 2),
        (1, 0, 0, 0, 0, 1),
    ]  # fmt: skip
    assert list(log) == [StepDecision(*row) for row in rows]
    assert len(log) == 9
    assert StepDecision(*rows[5]) in log
    assert StepDecision(0, 2, 1, 9, 1, 2) not in log
    on_host = Placement(weights=(), kv=(ON_HOST, ON_HOST))
    assert log.sources(on_host).n_recompute == pytest.approx((3 + 3 + 4 + 1) / 6)
    assert (log.solvers, log.solve_s) == ({"dp"}, 0.5)


def test_no_decode_no_mean():
    log = DecisionLog((Block(0, (Batch(1, 5),), 1),))
    log.observe(0, 0, Decision((0,), (1,)))
    assert log.sources(Placement(weights=(), kv=(ON_HOST,))) is None
    assert not DecisionLog()


# ---- how far ahead steps are linked -------------------------------------------------------------


def test_a_lane_without_ops_for_long_links_nothing_ahead():
    """Every 40th step stores: D2H waits for its step's compute, not for steps to be linked."""
    policy = FixedRecompute((*range(64, 103), 0))
    plan = planned(policy, Scenario(replace(OPT, n_layers=12), one_block(2, 4, 200, 120)))
    steps = Taken(policy, plan.decisions)
    made = Programs(policy, plan.model, plan.placement, plan.costs)
    (fence,) = drive(steps, plan.blocks, plan.costs)
    program = made.of_block(steps.taken, fence)
    d2h = list(Lane).index(Lane.D2H)
    stores = program.arrays.lane_ops[:, d2h] > 0
    assert 0 < stores.sum() < 10
    run = run_program(program.arrays, program.n_steps, 0.8)
    assert run.width == NARROWEST
    assert run.makespan_s == pytest.approx(SimBackend(plan.costs, 0.8).run(plan.ops).makespan_s)


def test_which_lanes_are_led():
    """Lanes whose first op waits for another lane's op of the same step, whatever loops do."""
    a, b = (Slot(name, Tier.GPU) for name in "ab")
    load, compute = replace(LOAD, writes=(a,)), replace(FORWARD, reads=(a,), writes=(b,))
    store, copy = Op(Kind.STORE_KV, 0, 0, reads=(b,)), Op(Kind.HOST_COPY, 0, 0)
    lanes = [Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.DISK, Lane.CPU]
    assert lanes == list(Lane)
    assert led([load, compute, store, copy]) == [1, 0, 1, 1, 0]  # no op on the disk: never asked
    assert led([store, compute, load]) == [1, 1, 0, 1, 1]  # overwriting waits as well
    assert led([compute, compute, load, load]) == [0, 1, 1, 1, 1]
    assert led([load, compute], in_loop=[1, 0]) == [0, 0, 1, 1, 1]  # no turn, no load
    assert led([compute, store], in_loop=[0, 1]) == [0, 1, 1, 1, 1]
    fence = Op(Kind.FENCE, 0, 0)
    assert led([fence, load, store]) == [0, 1, 1, 1, 1]


def led(ops, in_loop=None):
    template = plain_template(ops, families := Families(0))
    out, touched = np.zeros(5, np.uint8), np.zeros((families.n_slots, 2), np.uint8)
    find_led(
        out, template.lane, template.flags, np.array(in_loop or [0] * len(ops), np.uint8),
        template.first_read, template.read, template.first_write, template.write, touched,
    )  # fmt: skip
    return out.tolist()
