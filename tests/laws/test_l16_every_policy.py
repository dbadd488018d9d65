"""Every policy's plan on the SimPy engine: L1-L3, L6, L7, L9, and the max-plus recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.errors import OutOfMemory
from policies.plan.link import link
from policies.plan.predict import predict
from policies.trace.check import check_trace
from sim.engine import SimBackend
from sim.run import book
from tests.policies_table import CASES, POLICIES, SCENARIOS, case, fits, placed
from tests.reference import max_plus


@pytest.mark.parametrize(("policy", "scenario"), CASES)
def test_trace_keeps_the_laws(policy, scenario):
    plan = case(policy, scenario)
    backend = SimBackend(plan.costs, plan.hardware.duplex)
    trace = backend.run(plan.ops)
    check_trace(trace, backend.linked, plan.costs)
    if plan.hardware.duplex == 1.0:
        expected = predict(link(plan.ops), plan.costs.seconds)
        for span, (start_s, end_s) in zip(trace.spans, expected, strict=True):
            assert span.start_s == pytest.approx(start_s, rel=1e-9, abs=1e-12), span.key
            assert span.end_s == pytest.approx(end_s, rel=1e-9, abs=1e-12), span.key


@pytest.mark.parametrize("policy", POLICIES)
def test_engine_equals_the_oracle_that_compares_every_pair(policy):
    for scenario in ("max-new-2", "all-ones-twice"):
        plan = case(policy, scenario)
        spans = SimBackend(plan.costs).run(plan.ops).spans
        expected = max_plus(plan.ops, plan.costs.seconds)
        for span, (start_s, end_s) in zip(spans, expected, strict=True):
            assert span.start_s == pytest.approx(start_s, rel=1e-9, abs=1e-12), span.key
            assert span.end_s == pytest.approx(end_s, rel=1e-9, abs=1e-12), span.key


@pytest.mark.parametrize(("policy", "scenario"), CASES)
def test_ledger_stays_below_capacity(policy, scenario):
    plan = case(policy, scenario)
    peaks = book(plan.model, plan.hardware, plan.placement, POLICIES[policy].buffers, plan.blocks)
    for tier, peak in peaks.items():
        assert 0 <= peak <= plan.hardware.usable_bytes(tier)
    assert peaks["gpu"] > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
def test_too_small_a_tier_is_named(policy, tier):
    scenario = SCENARIOS["kv-on-disk" if tier == "disk" else "opt"]
    if not fits(POLICIES[policy], scenario):
        scenario = replace(scenario, host_share=None)  # fixed percentages overflow the host
    hardware = scenario.machine(POLICIES[policy])
    blocks = POLICIES[policy].blocks(scenario.blocks)
    placement = placed(POLICIES[policy], scenario)
    peaks = book(scenario.model, hardware, placement, POLICIES[policy].buffers, blocks)
    if not peaks[tier]:
        return  # a policy that does not use the tier cannot overflow it
    small = replace(hardware, **{f"{tier}_bytes": 0.999 * peaks[tier], f"{tier}_reserve_bytes": 0})
    with pytest.raises(OutOfMemory) as caught:
        book(scenario.model, small, placement, POLICIES[policy].buffers, blocks)
    assert caught.value.tier == tier
    assert caught.value.have_bytes == int(small.usable_bytes(tier)) < caught.value.need_bytes
