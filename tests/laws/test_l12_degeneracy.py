"""L12: TightLLM without recompute and slices is FlexGen without what makes it slow, op for op."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.errors import PlanError
from policies.flexgen import FlexGen
from policies.tightllm import TightLLM
from tests.policies_table import SCENARIOS, planned

BARE = TightLLM(distributor=False, loader=False)
STATIC = FlexGen(kv_pinned=True, sep_layer=False, attention="fused", fence=False)


def check_same(first, second) -> None:
    """Whole ops equal, slots included, in the same order."""
    for one, two in zip(first, second, strict=False):
        if one != two:
            raise PlanError(two.key, f"L12 degeneracy: expected {one}")
    if len(first) != len(second):
        raise PlanError(f"op {min(len(first), len(second))}", "L12 degeneracy: one plan goes on")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_plan(scenario):
    check_same(planned(BARE, SCENARIOS[scenario]).ops, planned(STATIC, SCENARIOS[scenario]).ops)


@pytest.mark.parametrize(
    "change",
    [{"sep_layer": True}, {"attention": "unfused"}, {"fence": True}, {"kv_pinned": False}],
    ids=lambda change: next(iter(change)),
)
def test_each_difference_is_named(change):
    ops = planned(BARE, SCENARIOS["opt"]).ops
    other = planned(replace(STATIC, **change), SCENARIOS["opt"]).ops
    with pytest.raises(PlanError, match="L12 degeneracy"):
        check_same(ops, other)


@pytest.mark.parametrize(
    ("on", "scenario"), [("distributor", "kv-on-disk"), ("loader", "ragged")], ids=str
)
def test_recompute_or_slices_are_named(on, scenario):
    policy = replace(BARE, solver="dp", **{on: True})
    ops = planned(BARE, SCENARIOS[scenario]).ops
    with pytest.raises(PlanError, match="L12 degeneracy"):
        check_same(ops, planned(policy, SCENARIOS[scenario]).ops)


def test_missing_op_is_named():
    ops = planned(BARE, SCENARIOS["opt"]).ops
    with pytest.raises(PlanError, match="one plan goes on"):
        check_same(ops, ops[:-1])
