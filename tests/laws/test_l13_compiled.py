"""L13: the compiled executor equals SimPy, and array programs equal the op-by-op plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim.fast
from policies.drive import Decision, drive
from policies.errors import PlanError
from policies.plan.link import link
from policies.plan.op import LANE_OF, Kind, Lane
from policies.trace.attribution import attribute
from policies.trace.metrics import lane_totals_s, metrics
from policies.trace.span import Trace
from sim.engine import SimBackend
from sim.executors import EVERY_STEP, fast_blocks
from sim.fast import FastBackend, run_program
from sim.program import Programs
from tests.policies_table import (
    CASES,
    MOE,
    OPT,
    POLICIES,
    SCENARIOS,
    FixedRecompute,
    Scenario,
    case,
    fits,
    one_block,
    planned,
)
from tests.strategies import plans

SAME = 1e-9
# Deep enough for layers to be cut and repeated: an even and an odd number, a run of dense layers.
DEEP = {
    "opt-12": Scenario(replace(OPT, n_layers=12), one_block()),
    "moe-13": Scenario(replace(MOE, n_layers=13, n_dense_layers=2), one_block(n_batches=2)),
    "one-batch-13": Scenario(replace(OPT, n_layers=13), one_block(n_batches=1)),
    "on-disk-11": Scenario(replace(OPT, n_layers=11), one_block(n_batches=2), host_share=0.7),
}


def check_same(one, two):
    """The same spans, times to 1e-9 relative; ``PlanError`` names the first that differs."""
    for a, b in zip(one, two, strict=True):
        close = all(
            abs(s - t) <= SAME * max(abs(s), abs(t))
            for s, t in ((a.start_s, b.start_s), (a.end_s, b.end_s))
        )
        if not close or a[:3] != b[:3] or a[5:] != b[5:]:
            raise PlanError(a.key, f"L13 executors agree: {b} is not {a}")


def numbered(ops):
    """What each op waits for as the last op of every lane, numbered per lane from 1."""
    lanes, count, places, rows = list(Lane), dict.fromkeys(Lane, 0), [], []
    for item in link(ops):
        lane = LANE_OF[item.op.kind]
        count[lane] += 1
        places.append((lanes.index(lane), count[lane]))
        row = [0] * len(lanes)
        for dep in item.deps:
            row[places[dep][0]] = places[dep][1]
        rows.append(row)
    return rows


class Replay:
    """A policy whose decisions were taken before."""

    def __init__(self, policy, decisions):
        self.policy, self.decisions, self.taken = policy, decisions, []
        self.name, self.buffers = policy.name, policy.buffers
        self.blocks, self.place = policy.blocks, policy.place

    def step(self, ctx, now, then):
        return self.policy.step(ctx, now, then)

    def decide(self, ctx):
        return self.decisions[ctx.block.index, ctx.step]


class Taken(Replay):
    """The same, but its steps are kept instead of emitted."""

    def step(self, ctx, now, then):
        self.taken.append((ctx, now, then))
        return iter(())


def programs(policy, plan):
    """The array program of each block of a plan, beside the block's ops."""
    steps = Taken(policy, plan.decisions)
    made = Programs(policy, plan.model, plan.placement, plan.costs)
    for fence in drive(steps, plan.blocks, plan.costs):
        program = made.of_block(steps.taken, fence)
        steps.taken = []
        yield program, [op for op in plan.ops if op.block == fence.block]


def check_programs(policy, plan):
    """Op for op: key and amounts, seconds, bytes, and what it waits for."""
    for program, ops in programs(policy, plan):
        emitted = [replace(op, reads=(), writes=()) for op in ops]
        assert [replace(op, reads=(), writes=()) for op in program.ops()] == emitted
        arrays = program.arrays
        assert list(program.seconds()) == [plan.costs.seconds(op) for op in ops]
        run = run_program(arrays, program.n_steps, 1.0, program.n_ops)
        assert run.waits_for.tolist() == numbered(ops)


# ---- any plan -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(plans(min_ops=1), st.sampled_from([0.5, 0.8, 0.97, 1.0]))
def test_any_plan(plan, duplex):
    ops, costs = plan
    simpy, fast = SimBackend(costs, duplex), FastBackend(costs, duplex)
    trace = simpy.run(ops)
    check_same(trace.spans, fast.run(ops).spans)
    assert fast.last.waits_for.tolist() == numbered(ops)
    assert fast.last.makespan_s == pytest.approx(trace.makespan_s, rel=SAME)
    if trace.makespan_s > 0:
        shares = attribute(trace.spans, [item.deps for item in simpy.linked]).shares
        for category, seconds in fast.last.charged_s.items():
            assert seconds == pytest.approx(shares[category] * trace.makespan_s, abs=1e-9)


def test_an_executor_that_forgets_a_reader_is_named():
    plan = case("tightllm-neither", "shared-link")
    ops, costs = plan.ops, plan.costs
    blind = [replace(op, reads=()) if op.kind is Kind.FORWARD else op for op in ops]
    with pytest.raises(PlanError, match="L13 executors agree"):
        check_same(SimBackend(costs, 0.8).run(ops).spans, FastBackend(costs, 0.8).run(blind).spans)


# ---- every policy -------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_policy(scenario):
    """Spans, metrics and attribution of every policy, block by block."""
    for name in [p for p, s in CASES if s == scenario]:
        plan, policy = case(name, scenario), POLICIES[name]
        duplex = plan.hardware.duplex
        simpy = SimBackend(plan.costs, duplex)
        replay = Replay(policy, plan.decisions)
        blocks = fast_blocks(
            replay, plan.blocks, plan.costs, plan.costs, lambda *_: None, lambda _: EVERY_STEP
        )
        for block, times in zip(plan.blocks, blocks, strict=True):
            ops = [op for op in plan.ops if op.block == block.index]
            trace = simpy.run(ops)
            check_same(trace.spans, times.spans)
            found = metrics(trace)
            waits = attribute(trace.spans, [item.deps for item in simpy.linked]).shares
            assert times.n_ops == len(ops)
            assert times.makespan_s == pytest.approx(found.makespan_s, rel=SAME)
            assert times.prefill_s == pytest.approx(found.prefill_s, rel=SAME)
            assert times.decode_s == pytest.approx(found.decode_s, rel=SAME, abs=1e-12)
            assert times.lane_s == pytest.approx(lane_totals_s(plan.costs, ops), rel=SAME)
            for lane, share in found.busy.items():
                assert times.busy_s[lane] == pytest.approx(share * found.makespan_s, rel=SAME)
            for category, share in waits.items():
                assert times.waits_s[category] == pytest.approx(
                    share * found.makespan_s, abs=SAME * found.makespan_s
                )


@pytest.mark.parametrize("scenario", DEEP)
def test_repeated_layers(scenario):
    """Every policy, in a model deep enough for templates to come from a cut one."""
    for name, policy in POLICIES.items():
        # What a decision is does not matter here, and solving takes long: one solver is enough.
        solves = name.startswith("tightllm") and name != "tightllm-dp"
        if not solves and fits(policy, DEEP[scenario]):
            check_programs(policy, planned(policy, DEEP[scenario]))


def test_step_ends_and_bytes():
    plan = case("flexgen-on-disk", "long")
    for program, ops in programs(POLICIES["flexgen-on-disk"], plan):
        found = metrics(SimBackend(plan.costs).run(ops))
        run = run_program(program.arrays, program.n_steps, 1.0)
        ends = [run.prefill_end_s, *run.step_end_s[1:]]
        assert np.diff(ends).tolist() == pytest.approx(list(found.step_s[0]), rel=SAME)
        moved = {key: n for key, n in found.nbytes.items() if n}
        assert {key: n for key, n in program.nbytes.items() if n} == moved


def test_a_narrow_window_changes_nothing(monkeypatch):
    """Only a few ops in memory: rings wrap all the time, and what is too narrow starts again."""
    plan = case("tightllm-dp", "shared-link")
    wide = [
        run_program(program.arrays, program.n_steps, 0.8, program.n_ops)
        for program, _ in programs(POLICIES["tightllm-dp"], plan)
    ]
    monkeypatch.setattr(sim.fast, "NARROWEST", 2)
    for before, (program, _) in zip(wide, programs(POLICIES["tightllm-dp"], plan), strict=True):
        after = run_program(program.arrays, program.n_steps, 0.8, program.n_ops)
        assert after.width <= 64 < program.n_ops
        assert after.end_s.tolist() == before.end_s.tolist()
        assert after.charged_s == before.charged_s


# ---- any decisions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anything(FixedRecompute):
    """Decisions drawn beforehand: steps in turn recompute a share and cut weights as drawn."""

    drawn: tuple = ()

    def decide(self, ctx):
        share, slices = self.drawn[ctx.step % len(self.drawn)]
        tails = tuple(min(n, int(share * (n + 1))) for n in ctx.n_ctx())
        return Decision(tails, slices[: ctx.n_batches])


_SHARES = st.sampled_from([0.0, 0.1, 0.5, 1.0]) | st.floats(0.0, 1.0)
_SLICES = st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
_STEPS = st.lists(st.tuples(_SHARES, _SLICES), min_size=1, max_size=5).map(tuple)


@settings(deadline=None, max_examples=25)
@given(_STEPS, st.integers(1, 3), st.sampled_from([1, 2, 40]), st.sampled_from([2, 9, 12]))
def test_any_decisions(drawn, n_batches, prompt_len, n_layers):
    job = one_block(n_batches, 4, prompt_len, 7)
    policy = Anything(drawn=drawn)
    check_programs(policy, planned(policy, Scenario(replace(OPT, n_layers=n_layers), job)))


def test_spans_of_an_empty_plan():
    assert FastBackend(case("flexgen", "opt").costs).run([]) == Trace(())
