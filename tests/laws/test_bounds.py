"""Bounds that a search prunes with: no run is faster than its bound, on any policy and scenario."""

from dataclasses import replace
from itertools import groupby

import pytest

from policies.cost.bound import may_recompute, run_bound
from policies.cost.breakeven import phase_cost
from policies.cost.fenced import fenced_step_s
from policies.cost.mixed_bound import mixed_bound, possible_placements
from policies.cost.model import CostModel
from policies.drive import drive
from policies.flexgen import FlexGen
from policies.mixed import Mixed
from policies.placement import host_placement
from policies.plan.op import Attention
from policies.step_ops import Zigzag
from policies.tightllm import TightLLM
from policies.trace.metrics import metrics
from sim.engine import SimBackend
from sim.search import SLACK
from tests.policies_table import (
    CASES,
    OPT,
    POLICIES,
    SCENARIOS,
    Planned,
    case,
    one_block,
    planned,
)

BY_PAGES = [c for c in CASES if not c[0].startswith("recompute")]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_run_is_faster_than_its_bound(scenario):
    for name in (p for p, s in BY_PAGES if s == scenario):
        plan = case(name, scenario)
        bound = run_bound(POLICIES[name], plan.costs, plan.blocks)
        prefill_s = decode_s = makespan_s = tpot_weight = 0.0
        for block in plan.blocks:
            ops = [op for op in plan.ops if op.block == block.index]
            found = metrics(SimBackend(plan.costs, plan.hardware.duplex).run(ops))
            prefill_s += found.prefill_s
            decode_s += found.decode_s
            makespan_s += found.makespan_s
            if block.max_new > 1:
                tpot_weight += block.n_seqs * found.decode_s / (block.max_new - 1)
        slack = 1 + SLACK
        assert bound.prefill_s <= prefill_s * slack, name
        assert bound.decode_s <= decode_s * slack, name
        assert bound.makespan_s <= makespan_s * slack, name
        seqs = sum(block.n_seqs for block in plan.blocks if block.max_new > 1)
        assert (bound.tpot_s is None) == (seqs == 0)
        if seqs:
            assert bound.tpot_s <= tpot_weight / seqs * slack, name


MIXED = [name for name, policy in POLICIES.items() if isinstance(policy, Mixed)]


@pytest.mark.parametrize("placement", ["host", "auto"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_share_of_inputs_beats_the_bound_of_all_shares(scenario, placement):
    """Whatever the homes hold, the share that ``mixed`` would choose or another."""
    for name in (p for p, s in CASES if s == scenario and p in MIXED):
        policy, held = replace(POLICIES[name], placement=placement), SCENARIOS[scenario]
        model, hardware, blocks = held.model, held.machine(policy), held.blocks
        least = mixed_bound(policy, model, hardware, blocks)
        for place in possible_placements(policy, model, hardware, blocks):
            costs = CostModel(model, hardware, place)
            ends = [
                metrics(SimBackend(costs, hardware.duplex).run(list(ops)))
                for _, ops in groupby(drive(policy, blocks, costs), key=lambda op: op.block)
            ]
            slack = 1 + SLACK
            assert least.prefill_s <= slack * sum(found.prefill_s for found in ends)
            assert least.decode_s <= slack * sum(found.decode_s for found in ends), place.inputs
            assert least.makespan_s <= slack * sum(found.makespan_s for found in ends)


@pytest.mark.parametrize("gpu_bytes", [16e9, 64e9])
def test_the_bound_of_all_shares_is_close(gpu_bytes):
    scenario = replace(SCENARIOS["long"], model=replace(OPT, n_layers=12))
    scenario = replace(scenario, hardware=replace(scenario.hardware, gpu_bytes=gpu_bytes))
    plan = planned(POLICIES["mixed"], scenario)
    found = metrics(SimBackend(plan.costs, plan.hardware.duplex).run(plan.ops))
    least = mixed_bound(POLICIES["mixed"], plan.model, plan.hardware, plan.blocks)
    assert least.decode_s >= found.decode_s / 1.1


def test_memory_of_a_share_lies_between_those_of_the_ends():
    scenario = SCENARIOS["long"]
    whole = SCENARIOS["long"].hardware
    policy = POLICIES["mixed"]
    kv, *_, inputs = possible_placements(policy, OPT, whole, scenario.blocks)
    tokens = sum(b.n_seqs * (b.prompt_len + 7) for b in scenario.blocks[0].batches)
    assert kv.home_bytes(OPT, scenario.blocks[0]) == (tokens * OPT.kv_bytes_per_token, 0)
    assert inputs.home_bytes(OPT, scenario.blocks[0]) == (0, tokens * OPT.kv_bytes_per_token / 2)
    (own,) = possible_placements(TightLLM(), OPT, whole, scenario.blocks)
    assert own == TightLLM().place(OPT, whole, scenario.blocks)


def deep(name: str) -> Planned:
    """A plan of enough layers that first and last do not matter."""
    scenario = replace(SCENARIOS["opt"], model=replace(OPT, n_layers=12),
                       blocks=one_block(n_seqs=64, max_new=6))  # fmt: skip
    return planned(POLICIES[name], scenario)


@pytest.mark.parametrize("name", ["flexgen-pinned", "flexgen-cpu-attention", "tightllm-neither"])
def test_bounds_of_decode_are_close(name):
    """A bound of zero would hold as well."""
    plan = deep(name)
    found = metrics(SimBackend(plan.costs, plan.hardware.duplex).run(plan.ops))
    bound = run_bound(POLICIES[name], plan.costs, plan.blocks)
    assert bound.decode_s >= found.decode_s / 1.1


def test_a_fence_costs_what_it_keeps_apart():
    """Here the host copies of pageable KV, behind which compute is issued."""
    plan = deep("flexgen")
    (block,) = plan.blocks
    how = POLICIES["flexgen"].schedule
    fenced_s = fenced_step_s(plan.costs, block, 2, how, stores=False)
    assert fenced_s > 1.2 * phase_cost(plan.costs, block, 2, how.attention, stores=False).bound_s
    with pytest.raises(ValueError, match="without fences"):
        fenced_step_s(plan.costs, block, 2, Zigzag(), stores=False)


def test_layers_of_every_kind_are_counted():
    """One layer on the GPU, two streamed."""
    scenario = SCENARIOS["opt"]
    placement = host_placement(OPT, scenario.hardware, scenario.blocks, resident_layers=1)
    assert placement.layer_kinds(OPT) == {0: 1, 1: 2}
    found = phase_cost(CostModel(OPT, scenario.hardware, placement), scenario.blocks[0], 1,
                       Attention.FUSED)  # fmt: skip
    assert found.weights_s == pytest.approx(2 * scenario.hardware.h2d.seconds(OPT.layer_bytes(1)))


def test_who_may_recompute():
    assert may_recompute(TightLLM())
    assert not may_recompute(TightLLM(distributor=False))
    assert not may_recompute(FlexGen())
    assert may_recompute(POLICIES["recompute-one"])  # not known: it may
