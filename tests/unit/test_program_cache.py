"""Runs that share templates give what they give alone, and share only what they may."""

from dataclasses import dataclass, field, replace

import pytest

from policies.cost.model import CostModel
from policies.flexgen import FlexGen
from sim.job import WorkloadSpec
from sim.program_cache import ProgramCache
from sim.run import RunSpec, simulate
from tests.policies_table import OPT, POLICIES, SMALL, case

FIXED = WorkloadSpec("fixed", "fixed", n_batches=3, batch_size=8, prompt_len=100, gen_len=6)


@pytest.mark.parametrize("name", ["tightllm-dp", "flexgen", "recompute-changing", "accelerate"])
def test_a_run_is_the_same_whatever_ran_before_it(name):
    known = ProgramCache()
    slower = replace(SMALL, h2d=replace(SMALL.h2d, bytes_per_s=3e9), gpu_bytes=64e9)
    for hardware in (SMALL, slower, SMALL):
        for change in ({}, {"batch_size": 32}, {"prompt_len": 700}, {"n_batches": 1}, {}):
            spec = RunSpec(OPT, hardware, POLICIES[name], replace(FIXED, **change), trace="full")
            alone, after = simulate(spec), simulate(spec, known=known)
            assert replace(after.record, solve_s=0.0) == replace(alone.record, solve_s=0.0)
            assert after.spans == alone.spans
            assert list(after.decisions) == list(alone.decisions)


def test_templates_are_made_once_for_what_is_alike():
    plan = case("flexgen", "opt")
    known, policy = ProgramCache(), POLICIES["flexgen"]
    first = known.programs(policy, plan.costs, plan.costs)
    again = known.programs(policy, plan.costs, plan.costs)
    assert again._library is first._library
    slower = CostModel(OPT, replace(SMALL, launch_s=1.0), plan.placement)
    assert known.programs(policy, slower, plan.costs)._library is first._library  # only priced anew
    for other in (
        known.programs(policy, plan.costs, slower),  # believes in another machine
        known.programs(FlexGen(fence=False), plan.costs, plan.costs),
        known.programs(policy, CostModel(OPT, SMALL, case("tightllm", "mla").placement), slower),
    ):
        assert other._library is not first._library


@dataclass(frozen=True, slots=True)
class Unhashable(FlexGen):
    tags: list[str] = field(default_factory=list)


def test_a_policy_that_cannot_be_hashed_shares_nothing():
    plan, known = case("flexgen", "opt"), ProgramCache()
    first, again = (known.programs(Unhashable(), plan.costs, plan.costs) for _ in range(2))
    assert first._library is not again._library
