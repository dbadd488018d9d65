"""CPU attention: who attends where, in which order, and that the CPU does not wait for the GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.bound import run_bound
from policies.cpu_attention import CpuAttention
from policies.cpu_step import cpu_step, spread, turns
from policies.drive import Decision, StepContext
from policies.homes import Homes
from policies.plan.check import checked
from policies.plan.op import Kind, Lane
from policies.schedule import zigzag
from policies.spec.workload import Batch, Block
from policies.step_ops import Zigzag
from policies.trace.metrics import metrics
from sim.engine import SimBackend
from tests.policies_table import (
    GQA,
    OPT,
    RAGGED,
    SMALL,
    Planned,
    Scenario,
    case,
    one_block,
    planned,
)

ON_CPU = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
FAST_LINK = replace(SMALL.h2d, bytes_per_s=6e10)
# Deep enough that the first and the last layer do not matter.
DEEP = replace(OPT, n_layers=12)
LONG = one_block(n_batches=4, n_seqs=32, prompt_len=700, max_new=4)
MACHINES = {
    "small": SMALL,
    "fast-cpu": replace(SMALL, cpu_attention_bytes_per_s=4e10),
    "slow-cpu": replace(SMALL, cpu_attention_bytes_per_s=2e9),
    "fast-link": replace(SMALL, h2d=FAST_LINK, d2h=FAST_LINK, cpu_attention_bytes_per_s=2e10),
}


def deep(policy: CpuAttention, machine: str = "small", blocks=LONG, model=DEEP) -> Planned:
    return planned(policy, Scenario(model, blocks, replace(MACHINES[machine], gpu_bytes=64e9)))


def decode_s(plan: Planned) -> float:
    return metrics(SimBackend(plan.costs).run(plan.ops)).decode_s


# ---- turns and slices -----------------------------------------------------------------------


@given(ON_CPU)
def test_every_batch_has_one_turn_and_cpu_batches_come_as_loads_progress(on_cpu):
    order = turns(on_cpu)
    assert sorted(order) == list(range(len(on_cpu)))
    n, m = sum(on_cpu), len(on_cpu) - sum(on_cpu)
    gpu_before, seen = 0, 0
    for batch in order:
        if on_cpu[batch]:
            seen += 1
            # Its share of the loads is behind it, not more than that.
            assert gpu_before * n >= seen * m > (gpu_before - 1) * n
        else:
            gpu_before += 1
    assert not n or on_cpu[order[-1]]


@given(ON_CPU, st.sampled_from([0, 2**20, 2**26, 2**40]), st.booleans())
def test_slices_are_large_and_the_last_turn_may_carry_none(on_cpu, layer_bytes, keep_last):
    slices = spread(on_cpu, layer_bytes, keep_last)
    pieces = sum(slices)
    assert pieces == 1 or layer_bytes / pieces >= 2**24
    assert max(slices) == 1
    assert slices[turns(on_cpu)[0]] == 1  # the first turn never waits
    if keep_last and len(on_cpu) > 1:
        assert slices[turns(on_cpu)[-1]] == 0


# ---- the split ------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", [DEEP, replace(GQA, n_layers=12)], ids=["mha", "gqa"])
def test_no_fixed_share_is_better(machine, model):
    chosen = deep(CpuAttention(), machine, model=model)
    fixed = [deep(CpuAttention(cpu_share=n / 4), machine, model=model) for n in range(5)]
    assert decode_s(chosen) <= 1.02 * min(map(decode_s, fixed))


def test_a_faster_cpu_gets_more():
    counts = [
        sum(deep(CpuAttention(), machine).decisions[0, 2].on_cpu)
        for machine in ("slow-cpu", "small", "fast-cpu")
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[2]


def test_batches_that_differ_are_weighed_by_their_tokens():
    """Here the CPU has time for about 100 of 420 tokens a sequence, whichever batch they are."""
    batches = (Batch(32, 300), Batch(32, 100), Batch(32, 20))
    for order in (batches, batches[::-1]):
        plan = deep(CpuAttention(), "slow-cpu", (Block(0, order, 3),))
        on_cpu = plan.decisions[0, 1].on_cpu
        taken = sum(b.prompt_len for b, there in zip(order, on_cpu, strict=True) if there)
        assert 20 <= taken <= 120


def test_prefill_is_attended_on_the_gpu():
    plan = case("cpu-attention", "opt")
    assert plan.decisions[0, 0].on_cpu == (0, 0, 0)
    assert all(op.step > 0 for op in plan.ops if op.kind is Kind.CPU_ATTEND)


def test_belief_decides():
    """A policy that thinks the CPU slow leaves it idle, whatever it is."""
    scenario = Scenario(DEEP, LONG, replace(MACHINES["fast-cpu"], gpu_bytes=64e9))
    slow = replace(scenario.hardware, cpu_attention_bytes_per_s=1e8)
    assert not any(planned(CpuAttention(), scenario, slow).decisions[0, 2].on_cpu)
    assert any(planned(CpuAttention(), scenario).decisions[0, 2].on_cpu)


# ---- the schedule ---------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["small", "fast-cpu"])
def test_a_step_is_little_longer_than_its_busiest_lane(machine):
    """With two CPU batches or more; one alone has to wait for its own next layer."""
    for share in (0.0, 0.5, 1.0):
        plan = deep(CpuAttention(cpu_share=share), machine)
        busy = Counter[Lane]()
        for op in plan.ops:
            if op.step == 2:
                busy[op.lane] += plan.costs.seconds(op)
        spans = SimBackend(plan.costs).run(plan.ops).spans
        ends = [max(s.end_s for s in spans if s.key.startswith(f"forward/g0/s{n}/"))
                for n in (1, 2)]  # fmt: skip
        assert ends[1] - ends[0] <= 1.06 * max(busy.values()), share


def test_the_cpu_never_waits_for_the_gpu_inside_a_step():
    """Where it is the busiest lane: the next queries are there before it has attended the last."""
    plan = deep(CpuAttention(cpu_share=1.0))
    spans = [s for s in SimBackend(plan.costs).run(plan.ops).spans
             if s.key.startswith("cpu_attend/g0/s2/")]  # fmt: skip
    within = spans[-1].end_s - spans[0].start_s
    assert sum(s.end_s - s.start_s for s in spans) >= 0.995 * within


def test_only_gpu_batches_load_their_kv():
    plan = deep(CpuAttention(cpu_share=0.5))
    for (_, step), decision in plan.decisions.items():
        for kind, expected in ((Kind.LOAD_KV, 0), (Kind.CPU_ATTEND, 1)):
            batches = {op.batch for op in plan.ops if op.kind is kind and op.step == step}
            wanted = {b for b, there in enumerate(decision.on_cpu) if there == expected}
            assert batches == (wanted if step else set())


def test_what_lies_on_disk_is_read_for_the_cpu():
    plan = case("cpu-attention-half", "kv-on-disk")
    there = plan.decisions[0, 1].on_cpu
    reads = Counter(op.batch for op in plan.ops if op.kind is Kind.READ_KV)
    assert any(there)
    assert set(reads) == set(range(len(there)))


def test_without_cpu_batches_it_is_the_zigzag():
    scenario = Scenario(OPT, RAGGED, replace(SMALL, gpu_bytes=64e9))
    mine, their = (planned(policy, scenario) for policy in (CpuAttention(cpu_share=0.0), _Zigzag()))
    assert Counter(op.key for op in mine.ops) == Counter(op.key for op in their.ops)
    one, two = (SimBackend(plan.costs).run(plan.ops).makespan_s for plan in (mine, their))
    assert one == pytest.approx(two, rel=0.02)


class _Zigzag(CpuAttention):
    def step(self, ctx, now, then):
        return zigzag(ctx, now, then)

    def decide(self, ctx):
        return CpuAttention(cpu_share=0.0).decide(ctx)


def test_bound_of_decode_is_close():
    plan = deep(CpuAttention(parts=4))
    assert run_bound(CpuAttention(parts=4), plan.costs, plan.blocks).decode_s >= 0.9 * decode_s(
        plan
    )


# ---- blocks and errors ----------------------------------------------------------------------


def test_parts_keep_all_sequences():
    blocks = (Block(0, (Batch(7, 10), Batch(2, 5)), 3),)
    (cut,) = CpuAttention(parts=3).blocks(blocks)
    assert cut.batches == (Batch(2, 10), Batch(2, 10), Batch(3, 10), Batch(1, 5), Batch(1, 5))
    assert CpuAttention().blocks(blocks) == blocks


@pytest.mark.parametrize(
    ("field", "value"),
    [("cpu_share", 1.5), ("cpu_share", -0.1), ("parts", 0), ("attention", "cpu")],
)
def test_wrong_settings_are_named(field, value):
    with pytest.raises(ValueError, match=rf"policy\.{field}: '?{value}"):
        CpuAttention(**{field: value})


@pytest.mark.parametrize(
    "how", [Zigzag(fence=True), Zigzag(kv_pinned=False), Zigzag(sep_layer=True)]
)
def test_what_the_schedule_cannot_do_is_refused(how):
    plan = case("cpu-attention", "opt")
    ctx = StepContext(1, plan.blocks[0], plan.model, plan.hardware, plan.placement, plan.costs,
                      (Homes(),) * 3, {})  # fmt: skip
    with pytest.raises(ValueError, match="cpu_step needs"):
        cpu_step(ctx, Decision((0,) * 3, (1, 0, 0)), None, how)


def test_the_new_token_is_at_home_before_the_cpu_attends():
    """Or its store would wait for the CPU, and hold up the queries of the batches behind it."""
    plan = case("cpu-attention-half", "opt")
    at = {op.key: i for i, op in enumerate(plan.ops)}
    stored = [op.key for op in plan.ops if op.kind is Kind.CPU_ATTEND and op.step < 3]
    assert stored
    for attend in stored:  # the last step stores nothing
        where = attend.removeprefix("cpu_attend/")
        project = f"forward/{where.removesuffix('p0')}p2"
        assert at[project] < at[f"store_kv/{where}"] < at[attend]


class _Changing(CpuAttention):
    """Other batches attend on the CPU in every step."""

    def decide(self, ctx):
        decided = super().decide(ctx)
        if ctx.is_prefill:
            return decided
        on_cpu = tuple((ctx.step + 1) * (b + 2) % 3 % 2 for b in range(ctx.n_batches))
        return replace(decided, on_cpu=on_cpu)


@pytest.mark.parametrize("n_layers", [1, 2, 3])
@pytest.mark.parametrize("host_share", [None, 0.7, 0.3])
def test_who_attends_where_is_free_in_every_step(n_layers, host_share):
    """Also with one layer, where a batch is stored and loaded at once, and with KV on disk."""
    blocks = (Block(0, (Batch(8, 100), Batch(8, 130), Batch(3, 1), Batch(8, 60)), 7),)
    model, machine = replace(OPT, n_layers=n_layers), replace(SMALL, gpu_bytes=64e9)
    plan = planned(_Changing(), Scenario(model, blocks, machine, host_share))
    assert len({decision.on_cpu for decision in plan.decisions.values()}) > 2
    assert list(checked(plan.ops, plan.model, plan.placement, plan.blocks)) == list(plan.ops)


def test_reads_from_disk_do_not_wait_for_writes():
    """A write waits for its batch's projection; reads of the next batches go first."""
    machine = replace(SMALL, gpu_bytes=64e9, cpu_attention_bytes_per_s=5e10)
    scenario = Scenario(replace(GQA, n_layers=12), LONG, machine, host_share=0.8)
    plan = planned(CpuAttention(cpu_share=1.0), scenario)
    assert plan.placement.kv[0].disk > 0.5
    spans = {span.key: span for span in SimBackend(plan.costs).run(plan.ops).spans}
    ahead = [spans[f"read_kv/g0/s2/l{i}/b0/p0"].start_s
             < spans[f"forward/g0/s2/l{i}/b0/p2"].start_s for i in range(1, 12)]  # fmt: skip
    assert all(ahead)
