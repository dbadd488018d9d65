"""L4: the sources of a forward cover the cached tokens exactly once.

For that, what leaves the recompute window must be stored in the step before it is loaded.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import PlanError
from policies.plan.check import checked
from policies.plan.op import Kind, Scope
from policies.spec.workload import Batch, Block
from tests.policies_table import (
    CASES,
    OPT,
    POLICIES,
    SCENARIOS,
    FixedRecompute,
    Planned,
    Scenario,
    case,
    planned,
)


def check(plan: Planned, ops=None) -> None:
    list(checked(plan.ops if ops is None else ops, plan.model, plan.placement, plan.blocks))


@pytest.mark.parametrize(("policy", "scenario"), CASES)
def test_plan_is_right(policy, scenario):
    """L4, L5, L15, unique keys and written before read: what the plan checker knows."""
    check(case(policy, scenario))


BLOCKS = st.builds(
    lambda batches, max_new: (Block(0, tuple(batches), max_new),),
    st.lists(st.builds(Batch, st.integers(1, 40), st.integers(1, 700)), min_size=1, max_size=4),
    st.integers(1, 5),
)
MODELS = st.builds(
    lambda name, n_layers: replace(
        SCENARIOS[name].model, n_layers=n_layers,
        n_dense_layers=min(n_layers, SCENARIOS[name].model.n_dense_layers),
    ),
    st.sampled_from(["opt", "gqa", "moe", "mla"]),
    st.integers(1, 4),
)  # fmt: skip
# Gurobi's decisions equal those of the dynamic program (L14), which starts faster.
QUICK = [name for name in POLICIES if name != "tightllm"]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(QUICK), MODELS, BLOCKS)
def test_any_job_is_planned_right(name, model, blocks):
    check(planned(POLICIES[name], Scenario(model, blocks)))


# ---- the recompute window ---------------------------------------------------------------------

COUNTS = st.lists(st.integers(-3, 12) | st.sampled_from([0, 1, -1, 10**9]), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(COUNTS, BLOCKS)
def test_recompute_window(counts, blocks):
    """Every step stores from what is stored to what the next step will not recompute."""
    plan = planned(FixedRecompute(tuple(counts)), Scenario(replace(OPT, n_layers=2), blocks))
    check(plan)
    block = plan.blocks[0]
    for b, batch in enumerate(block.batches):
        n_stored = 0
        for step in range(block.max_new):
            n_ctx = batch.prompt_len + step - 1 if step else 0
            n_recompute = plan.decisions[0, step].n_recompute[b]
            assert n_ctx - n_recompute <= n_stored
            forwards = [op for op in at(plan, step, b, Kind.FORWARD) if op.scope is Scope.LAYER]
            assert {(op.n_ctx, op.n_recompute) for op in forwards} == {(n_ctx, n_recompute)}
            loads = {(op.start, op.stop) for op in at(plan, step, b, Kind.LOAD_KV)}
            assert loads == ({(0, n_ctx - n_recompute)} if n_ctx > n_recompute else set())
            stores = at(plan, step, b, Kind.STORE_KV)
            keep = n_stored
            if step < block.max_new - 1:
                after = batch.prompt_len + step - plan.decisions[0, step + 1].n_recompute[b]
                keep = max(n_stored, after)
            ranges = {(op.start, op.stop) for op in stores}
            assert ranges == ({(n_stored, keep)} if keep > n_stored else set())
            assert len(stores) == (plan.model.n_layers if keep > n_stored else 0)
            n_stored = keep


def at(plan: Planned, step: int, batch: int, kind: Kind):
    return [op for op in plan.ops if (op.kind, op.step, op.batch) == (kind, step, batch)]


def test_generating_one_token_stores_nothing():
    for name in POLICIES:
        kinds = {op.kind for op in case(name, "max-new-1").ops}
        assert not kinds & {Kind.STORE_KV, Kind.WRITE_KV, Kind.LOAD_KV, Kind.HOST_COPY}, name


def test_what_is_recomputed_at_once_is_never_stored():
    """Prefill stores [0, n_ctx[1] - N_r[1]); with everything recomputed that is nothing."""
    assert not [op for op in case("recompute-all", "opt").ops if op.kind is Kind.STORE_KV]
    first = next(op for op in case("recompute-one", "opt").ops if op.kind is Kind.STORE_KV)
    assert (first.step, first.start, first.stop) == (0, 0, 255)


# ---- plans that are wrong ---------------------------------------------------------------------


def broken(policy: str, scenario: str, kind: Kind, change, step: int = 1):
    """The plan with its first op of a kind and step changed (None: left out)."""
    plan = case(policy, scenario)
    i = next(i for i, op in enumerate(plan.ops) if (op.kind, op.step) == (kind, step))
    new = change(plan.ops[i])
    ops = [*plan.ops[:i], *(() if new is None else (new,)), *plan.ops[i + 1 :]]
    return plan, ops


@pytest.mark.parametrize(
    ("policy", "kind", "change", "step", "rule"),
    [
        pytest.param(
            "flexgen-pinned", Kind.LOAD_KV, lambda op: replace(op, stop=op.stop - 1), 1,
            "sources of a forward cover tokens", id="load one token short",
        ),
        pytest.param(
            "recompute-one", Kind.LOAD_KV, lambda op: replace(op, stop=op.stop + 1), 1,
            "only stored tokens", id="load a token that is recomputed",
        ),
        pytest.param(
            "recompute-changing", Kind.FORWARD, lambda op: replace(op, n_recompute=0), 1,
            "sources of a forward cover tokens", id="forget to recompute",
        ),
        pytest.param(
            "flexgen-pinned", Kind.STORE_KV, lambda op: None, 0,
            "only stored tokens", id="forget to store the prompt",
        ),
        pytest.param(
            "flexgen-pinned", Kind.STORE_KV, lambda op: replace(op, stop=op.stop + 1), 0,
            "only tokens that the slot holds", id="store what was not computed",
        ),
        pytest.param(
            "flexgen", Kind.LOAD_KV, lambda op: replace(op, part=1), 1,
            "L3 keys|sources of a forward|only stored", id="load the values twice",
        ),
        pytest.param(
            "flexgen-cpu-attention", Kind.CPU_ATTEND, lambda op: replace(op, n_ctx=op.n_ctx + 1),
            1, "sources of a forward cover tokens", id="attend to a token that is elsewhere",
        ),
    ],
)  # fmt: skip
def test_broken_plan_is_named(policy, kind, change, step, rule):
    plan, ops = broken(policy, "opt", kind, change, step)
    with pytest.raises(PlanError, match=rule):
        check(plan, ops)


def test_disk_must_be_read():
    plan, ops = broken("tightllm-neither", "kv-on-disk", Kind.READ_KV, lambda op: None)
    with pytest.raises(PlanError, match="written before it is read"):
        check(plan, ops)
    blind = [
        replace(op, reads=tuple(s for s in op.reads if "staging" not in s.name))
        if op.kind is Kind.LOAD_KV
        else op
        for op in ops
    ]
    with pytest.raises(PlanError, match="home on disk are read before they are used"):
        check(plan, blind)
