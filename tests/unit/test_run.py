"""One run: what a record says, and that infeasible work is a record, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.accelerate import Accelerate
from policies.cost.model import CostModel
from policies.drive import drive
from policies.flexgen import FlexGen
from policies.plan.op import Lane
from policies.tightllm import TightLLM
from policies.trace.metrics import lane_totals_s, metrics
from policies.trace.span import Trace
from sim.engine import SimBackend
from sim.job import WorkloadSpec
from sim.run import RunSpec, book, simulate
from tests.policies_table import OPT, SMALL, FixedRecompute

FIXED = WorkloadSpec("fixed", "fixed", 3, 16, prompt_len=200, gen_len=5)
SPEC = RunSpec(OPT, SMALL, TightLLM(solver="dp"), FIXED)


def test_record_is_what_the_trace_says():
    result = simulate(SPEC)
    record, trace = result.record, Trace(result.spans)
    found = metrics(trace)
    assert (record.status, record.trace, record.n_ops) == ("ok", "full", len(result.spans))
    assert record.makespan_s == trace.makespan_s
    assert (record.prefill_s, record.decode_s) == (found.prefill_s, found.decode_s)
    assert record.ttft_s == found.ttft_s[0]
    assert record.tpot_s == pytest.approx(found.decode_s / 4)
    assert record.prefill_tokens_per_s == pytest.approx(48 * 200 / found.prefill_s)
    assert record.decode_tokens_per_s == pytest.approx(48 * 4 / found.decode_s)
    assert record.h2d_busy == pytest.approx(found.busy[Lane.H2D])
    waits = [v for k, v in record.as_row().items() if k.startswith("wait_")]
    assert sum(waits) == pytest.approx(1.0, abs=1e-6)


def test_lower_bound_is_the_longest_lane_of_this_plan():
    policy = FlexGen(kv_pinned=True)
    record = simulate(replace(SPEC, policy=policy)).record
    blocks = simulate(replace(SPEC, policy=policy)).job.blocks
    costs = CostModel(OPT, SMALL, policy.place(OPT, SMALL, blocks))
    totals = lane_totals_s(costs, drive(policy, blocks, costs))
    assert record.lower_bound_s == pytest.approx(max(totals.values()))
    assert record.bound_ratio == pytest.approx(record.makespan_s / record.lower_bound_s)
    assert record.bound_ratio >= 1.0


def test_decisions():
    result = simulate(replace(SPEC, policy=FixedRecompute((0, 7, 3, 7, 3))))
    lines = [(d.step, d.batch, d.n_ctx, d.n_recompute) for d in result.decisions]
    assert lines[:4] == [(0, 0, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0), (1, 0, 200, 7)]
    assert len(lines) == 5 * 3
    assert result.record.n_recompute_mean == pytest.approx(5.0)  # prefill has none to decide


def test_blocks_follow_one_another():
    """Simulated one at a time and added: the same as all of them at once."""
    spec = replace(SPEC, policy=Accelerate(), workload=FIXED)
    result = simulate(spec)
    blocks = Accelerate().blocks(result.job.blocks)
    assert len(blocks) == result.record.n_blocks == 3
    costs = CostModel(OPT, SMALL, Accelerate().place(OPT, SMALL, blocks))
    at_once = SimBackend(costs).run(drive(Accelerate(), blocks, costs))
    assert result.record.makespan_s == pytest.approx(at_once.makespan_s, rel=1e-9)
    for one, two in zip(result.spans, at_once.spans, strict=True):
        assert one.key == two.key
        assert one.end_s == pytest.approx(two.end_s, rel=1e-9)


def test_progress_counts_blocks():
    seen = []
    simulate(replace(SPEC, policy=Accelerate()), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("hardware", "tier"),
    [
        (replace(SMALL, gpu_bytes=1e8), "gpu"),
        (replace(SMALL, host_bytes=1e8), "host"),
        (replace(SMALL, host_bytes=4e8, disk_bytes=1e6), "disk"),
    ],
)
def test_what_does_not_fit_is_a_row(hardware, tier):
    result = simulate(replace(SPEC, hardware=hardware))
    record = result.record
    assert (record.status, record.oom_tier) == ("oom", tier)
    assert record.need_bytes > record.have_bytes == int(hardware.usable_bytes(tier))
    assert tier in record.reason
    assert record.makespan_s is record.decode_tokens_per_s is record.n_ops is None
    assert result.spans == () == result.decisions


def test_infeasible_is_a_row():
    workload = WorkloadSpec("sharegpt", "sharegpt", 4, 4, limit=8, reject_long=True)
    result = simulate(replace(SPEC, model=replace(OPT, max_positions=1), workload=workload))
    assert (result.record.status, result.job) == ("infeasible", None)
    assert result.record.reason


def test_one_token_has_no_decode():
    record = simulate(replace(SPEC, workload=replace(FIXED, gen_len=1))).record
    assert record.decode_tokens_per_s is record.tpot_s is record.n_recompute_mean is None
    assert record.decode_s == 0.0
    assert record.prefill_tokens_per_s > 0


def test_trace_modes():
    none, full = (simulate(replace(SPEC, trace=mode)) for mode in ("none", "full"))
    assert (none.spans, none.record.trace) == ((), "none")
    assert none.record == replace(full.record, trace="none", solve_s=none.record.solve_s)
    with pytest.raises(ValueError, match="trace: 'some' is none of auto, full, none"):
        replace(SPEC, trace="some")


def test_long_runs_keep_their_first_steps(monkeypatch):
    monkeypatch.setattr("sim.run.AUTO_TRACE_OPS", 10)
    result = simulate(replace(SPEC, policy=Accelerate()))
    assert result.record.trace == "first steps"
    assert {key.split("/")[1] for key in (s.key for s in result.spans)} == {"g0"}
    assert {key.split("/")[2] for key in (s.key for s in result.spans)} == {"s0", "s1", "s2"}


def test_wrong_belief_costs_time_but_moves_the_same_plan():
    """A policy that thinks the link is fast recomputes less than it should."""
    slow = replace(SMALL, h2d=replace(SMALL.h2d, bytes_per_s=2e9))
    workload = replace(FIXED, batch_size=64, prompt_len=600)
    right = simulate(replace(SPEC, hardware=slow, workload=workload))
    wrong = simulate(replace(SPEC, hardware=slow, workload=workload, belief=SMALL))
    assert wrong.record.n_recompute_mean < right.record.n_recompute_mean
    assert wrong.record.makespan_s > right.record.makespan_s
    same = simulate(replace(SPEC, hardware=slow, workload=workload, belief=slow))
    assert same.record.makespan_s == right.record.makespan_s


def test_peaks_are_of_the_largest_block():
    policy = Accelerate()
    result = simulate(replace(SPEC, policy=policy))
    blocks = policy.blocks(result.job.blocks)
    placement = policy.place(OPT, SMALL, blocks)
    alone = book(OPT, SMALL, placement, policy.buffers, blocks[:1])
    assert result.record.peak_gpu_bytes == alone["gpu"]
