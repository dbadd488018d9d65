"""L16: what must happen to simulated time when the machine changes.

Plans are held fixed, so that only the machine's answer changes; TightLLM, which plans anew, may
lose to a tie-break of its near-optima at most one per cent.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost.model import CostModel
from policies.plan.memory import block_pools, run_pools
from policies.plan.op import Kind, Tier
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from sim.engine import SimBackend
from tests.policies_table import CASES, OPT, POLICIES, SCENARIOS, SMALL, Planned, case, planned

RATES = ("hbm_bytes_per_s", "cpu_attention_bytes_per_s", "cpu_bytes_per_s")


def faster(
    hardware: HardwareProfile, factor: float, names: tuple[str, ...] = ()
) -> HardwareProfile:
    """The profile with rates (those named, or all) times ``factor``; latencies as they are."""
    changed = {}
    for item in fields(hardware):
        value = getattr(hardware, item.name)
        if names and item.name not in names:
            continue
        if isinstance(value, Link):
            changed[item.name] = replace(value, bytes_per_s=value.bytes_per_s * factor)
        elif isinstance(value, Curve):
            changed[item.name] = replace(value, y=tuple(y * factor for y in value.y))
        elif isinstance(value, Grid):
            rows = tuple(tuple(z * factor for z in row) for row in value.z)
            changed[item.name] = replace(value, z=rows)
        elif item.name in RATES:
            changed[item.name] = value * factor
    assert not names or set(changed) == set(names)
    return replace(hardware, **changed)


def without_latency(hardware: HardwareProfile) -> HardwareProfile:
    links = {
        item.name: replace(getattr(hardware, item.name), latency_s=0.0)
        for item in fields(hardware)
        if isinstance(getattr(hardware, item.name), Link)
    }
    return replace(hardware, launch_s=0.0, sync_s=0.0, **links)


def makespan_s(plan: Planned, hardware: HardwareProfile) -> float:
    """Time of a fixed plan on some machine."""
    costs = CostModel(plan.model, hardware, plan.placement)
    return SimBackend(costs, hardware.duplex).run(plan.ops).makespan_s


@pytest.mark.parametrize("scenario", ["opt", "mla", "moe", "ragged", "shared-link", "kv-on-disk"])
def test_twice_the_rates_half_the_time(scenario):
    """Exactly: doubling is exact in binary, and nothing else is in a duration."""
    for name in POLICIES:
        if (name, scenario) not in CASES:
            continue
        plan = case(name, scenario)
        slow = without_latency(plan.hardware)
        before, after = (
            SimBackend(CostModel(plan.model, hw, plan.placement), hw.duplex).run(plan.ops).spans
            for hw in (slow, faster(slow, 2.0))
        )
        for one, two in zip(before, after, strict=True):
            assert (two.start_s, two.end_s) == (one.start_s / 2, one.end_s / 2), two.key


@pytest.mark.parametrize("name", ["tightllm-dp", "tightllm-serial-links"])
def test_twice_the_rates_the_same_decisions(name):
    for scenario in ("opt", "long", "kv-on-disk"):
        slow = replace(SCENARIOS[scenario], hardware=without_latency(SCENARIOS[scenario].hardware))
        fast = replace(slow, hardware=faster(slow.hardware, 2.0))
        one, two = planned(POLICIES[name], slow), planned(POLICIES[name], fast)
        assert [d.n_recompute for d in one.decisions.values()] == [
            d.n_recompute for d in two.decisions.values()
        ]
        assert one.ops == two.ops


def test_forgotten_latency_is_noticed():
    plan = case("tightllm-dp", "opt")
    slow = makespan_s(plan, SMALL)
    assert makespan_s(plan, faster(SMALL, 2.0)) > slow / 2


# ---- directions -------------------------------------------------------------------------------

# Policy and scenario that use a part of the machine. With the part at a tenth of its rate the plan
# waits for it, so its time must follow.
USED = [
    ("flexgen-pinned", "long", "h2d"),
    ("tightllm-dp", "long", "h2d"),
    ("flexgen-pinned", "long", "d2h"),
    ("accelerate", "opt", "h2d_pageable"),
    ("accelerate", "opt", "hbm_bytes_per_s"),
    ("accelerate", "long", "gemm"),
    ("accelerate", "long", "attention_prefill"),
    ("accelerate", "long", "attention_decode"),
    ("recompute-all", "long", "gemm"),
    ("recompute-changing", "one-batch", "attention_window"),
    ("flexgen", "long", "host_copy"),
    ("flexgen", "prompt-1", "d2h_pageable"),
    ("flexgen-pinned", "kv-on-disk", "disk_read"),
    ("flexgen-pinned", "kv-on-disk", "disk_write"),
    ("tightllm-dp", "weights-on-disk", "disk_read"),
    ("flexgen-cpu-attention", "long", "cpu_attention_bytes_per_s"),
]


@pytest.mark.parametrize(("name", "scenario", "rate"), USED)
def test_a_faster_part_that_is_used_saves_time(name, scenario, rate):
    plan = case(name, scenario)
    factors = (0.05, 0.1, 0.2)
    times = [makespan_s(plan, faster(plan.hardware, f, (rate,))) for f in factors]
    assert times[0] > times[1] * 1.001 > times[2] * 1.001**2
    assert times[2] >= makespan_s(plan, plan.hardware)


@pytest.mark.parametrize(("name", "scenario", "rate"), [
    ("accelerate", "opt", "h2d"),
    ("flexgen-pinned", "opt", "h2d_pageable"),
    ("flexgen-pinned", "opt", "host_copy"),
    ("tightllm-dp", "opt", "disk_read"),
    ("tightllm-dp", "opt", "cpu_attention_bytes_per_s"),
])  # fmt: skip
def test_a_part_that_is_not_used_changes_nothing(name, scenario, rate):
    plan = case(name, scenario)
    assert makespan_s(plan, faster(plan.hardware, 0.5, (rate,))) == makespan_s(plan, plan.hardware)


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(["opt", "gqa", "long", "ragged", "kv-on-disk", "weights-on-disk"]),
    st.sampled_from(["h2d", "d2h", "disk_read", "gemm", "hbm_bytes_per_s", "attention_decode"]),
    st.sampled_from([1.1, 1.5, 3.0, 10.0]),
)
def test_planning_anew_on_a_faster_machine_costs_at_most_a_per_cent(scenario, rate, factor):
    """Twelve layers: a decision is for a layer in the middle, of which three have only one."""
    policy, job = POLICIES["tightllm-dp"], SCENARIOS[scenario]
    job = replace(job, model=replace(job.model, n_layers=12))
    before = planned(policy, job)
    after = planned(policy, replace(job, hardware=faster(job.hardware, factor, (rate,))))
    slow, fast = (makespan_s(plan, plan.hardware) for plan in (before, after))
    assert fast <= slow * 1.01


def test_more_host_memory_means_less_on_disk_and_less_time():
    policy = POLICIES["flexgen-pinned"]
    times, on_disk = [], []
    for share in (0.55, 0.7, 0.85, None):
        plan = planned(policy, replace(SCENARIOS["kv-on-disk"], host_share=share))
        times.append(makespan_s(plan, plan.hardware))
        pools = [*run_pools(plan.model, plan.placement, policy.buffers)]
        pools += block_pools(plan.model, plan.placement, policy.buffers, plan.blocks[0])
        on_disk.append(sum(p.nbytes for p in pools if p.tier is Tier.DISK))
    assert on_disk == sorted(on_disk, reverse=True)
    assert on_disk[-1] == 0
    assert len(set(on_disk)) == 4
    assert times == sorted(times, reverse=True)


def test_more_gpu_memory_with_placement_auto_loads_less():
    policy = replace(POLICIES["tightllm-dp"], placement="auto", distributor=False)
    loaded = []
    for gpu_bytes in (1.0e9, 1.1e9, 1.2e9, 16e9):
        hardware = replace(SMALL, gpu_bytes=gpu_bytes)
        plan = planned(policy, replace(SCENARIOS["opt"], hardware=hardware))
        weights = [op for op in plan.ops if op.kind is Kind.LOAD_WEIGHT]
        loaded.append(sum(plan.costs.nbytes(op) for op in weights))
    assert loaded == sorted(loaded, reverse=True)
    assert loaded[0] > loaded[-1] == 0


def test_gib_for_gb_is_noticed():
    """One layer of this model over this link, by hand; a link of 12 GiB/s gives 7 % less."""
    plan = case("accelerate-pinned", "all-ones")
    loads = [op for op in plan.ops if op.kind is Kind.LOAD_WEIGHT]
    d, ffn = OPT.d_model, OPT.d_ffn
    # Four projections and two MLP matrices with their biases, two norms, 16 bit.
    elems = 4 * (d * d + d) + (2 * d * ffn + ffn + d) + 2 * (2 * d)
    pinned_s = 2 * 1e-5 + 2 * elems / 12e9
    assert sum(plan.costs.nbytes(op) for op in loads) == 2 * elems
    assert sum(plan.costs.seconds(op) for op in loads) == pytest.approx(pinned_s, rel=1e-12)
    gib = replace(SMALL, h2d=Link(1e-5, 12 * 2**30))
    swapped = CostModel(plan.model, gib, plan.placement)
    assert sum(swapped.seconds(op) for op in loads) != pytest.approx(pinned_s, rel=0.05)
