"""Where cached tokens come from: the columns of a record against a count step by step."""

from dataclasses import replace

import pytest

from policies.drive import Decision, drive_steps
from policies.homes import Source
from policies.placement import ON_GPU, ON_HOST, Placement
from policies.plan.op import Attention
from policies.spec.workload import Batch, Block
from policies.trace.decisions import read_decisions, step_decisions, write_decisions
from policies.trace.sources import Run, Sources, inputs_share, mean_sources, source_columns
from sim.decisions import DecisionLog
from tests.policies_table import CASES, POLICIES, case

SOME = ("opt", "gqa", "ragged", "kv-on-disk", "one-layer", "max-new-2", "all-ones-twice")
NAMES = sorted({p for p, s in CASES if s in SOME})


class Counting:
    """A policy that counts, step by step, what its decisions take from which home."""

    def __init__(self, policy):
        self._policy = policy
        self.name, self.buffers = policy.name, policy.buffers
        self.decide = policy.decide
        self.rows = []

    def step(self, ctx, now, then):
        if not ctx.is_prefill:
            gpu = ctx.placement.kv[ctx.block.index].gpu
            for b, n_ctx in enumerate(ctx.n_ctx()):
                kv = ctx.n_from(Source.KV, b, now)
                cpu = bool(now.on_cpu[b]) or self.buffers.attention is Attention.CPU
                self.rows.append((
                    0.0 if cpu else kv * (1 - gpu), ctx.n_from(Source.INPUT, b, now),
                    now.n_recompute[b] + now.n_front[b], kv if cpu else 0.0,
                    0.0 if cpu else kv * gpu, n_ctx,
                ))  # fmt: skip
        return iter(())


@pytest.mark.parametrize("name", NAMES)
def test_columns_are_what_a_count_step_by_step_gives(name):
    for scenario in (s for p, s in CASES if p == name and s in SOME):
        plan = case(name, scenario)
        counting, log = Counting(POLICIES[name]), DecisionLog(plan.blocks)
        for ops in drive_steps(counting, plan.blocks, plan.costs, log.observe):
            list(ops)
        cpu = counting.buffers.attention is Attention.CPU
        found = log.sources(plan.placement, cpu)
        n = len(counting.rows)
        *sources, n_ctx = (sum(column) / n for column in zip(*counting.rows, strict=True))
        held = [getattr(found, field) for field in Sources.__slots__]
        assert held == pytest.approx(sources, rel=1e-12)
        assert sum(held) == pytest.approx(n_ctx)


def test_homes_that_outgrow_a_shrinking_tail():
    """A tail that grew leaves homes unread; when it shrinks they are read, inputs and KV alike."""
    block = Block(0, (Batch(2, 10),), 9)
    decisions = [Decision((0,), (1,)), Decision((0,), (1,), n_inputs=(4,))]
    decisions += [Decision((8,), (1,))] * 3 + [Decision((1,), (1,))] * 2
    decisions += [Decision((1,), (1,), n_inputs=(1,))] * 2
    each = [Run(0, s, s + 1, d) for s, d in enumerate(decisions)]
    runs = [each[0], each[1], Run(0, 2, 5, decisions[2]), Run(0, 5, 7, decisions[5]),
            Run(0, 7, 9, decisions[7])]  # fmt: skip
    on_host = Placement(weights=(), kv=(ON_HOST,))
    assert mean_sources((block,), on_host, runs) == mean_sources((block,), on_host, each)
    found = mean_sources((block,), on_host, each)
    # Contexts 10..17; inputs are tokens 0..3 and, stored by the last two steps, 14 and 15.
    assert found.n_project * 8 == 4 + (3 + 4 + 4) + 4 + 4 + 5 + 6
    assert found.n_recompute * 8 == 0 + 3 * 8 + 4 * 1
    assert found.n_load * 8 == sum(range(10, 18)) - 34 - 28
    on_gpu = mean_sources((block,), replace(on_host, kv=(ON_GPU,)), each)
    assert (on_gpu.n_load, on_gpu.n_resident) == (0.0, found.n_load)
    there = mean_sources((block,), on_host, each, cpu=True)
    assert (there.n_load, there.n_cpu) == (0.0, found.n_load)


def test_no_decode_no_columns():
    block = Block(0, (Batch(1, 5),), 1)
    found = mean_sources((block,), Placement((), (ON_HOST,)), [Run(0, 0, 1, Decision((0,), (1,)))])
    assert found is None
    assert source_columns(found) == dict.fromkeys(
        ("n_load_mean", "n_project_mean", "n_recompute_mean", "n_cpu_mean", "n_resident_mean")
    )


def test_share_of_inputs_is_by_tokens_of_all_blocks():
    blocks = (Block(0, (Batch(3, 10), Batch(1, 5)), 1), Block(1, (Batch(2, 4),), 3))
    placement = Placement((), (ON_HOST, ON_HOST), inputs=((5, 5), (0,)))
    assert inputs_share(blocks, placement) == 20 / (30 + 5 + 12)
    assert inputs_share(blocks, replace(placement, inputs=())) == 0.0


def test_decisions_are_read_as_written_and_from_before_they_had_all_columns(tmp_path):
    path = tmp_path / "decisions.csv"
    block = Block(0, (Batch(2, 10), Batch(2, 10)), 3)
    decision = Decision((1, 2), (3, 0), n_front=(4, 0), n_inputs=(5, 6), on_cpu=(0, 1))
    rows = tuple(step_decisions(block, 1, decision))
    write_decisions(rows, path)
    assert read_decisions(path) == rows
    lines = [",".join(line.split(",")[:6]) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    assert read_decisions(path) == tuple(r._replace(n_front=0, n_inputs=0, on_cpu=0) for r in rows)
    path.write_text("block,step,batch,n_ctx,slices\n")
    with pytest.raises(ValueError, match="lacks the columns n_recompute"):
        read_decisions(path)
    path.write_text(lines[0] + "\n0,1,0,10,x,1\n")
    with pytest.raises(ValueError, match="invalid literal"):
        read_decisions(path)
