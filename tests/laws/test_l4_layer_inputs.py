"""L4 and L9 where homes hold layer inputs: stored once, projected all, no more than is booked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.drive import Decision, StepContext, with_inputs
from policies.errors import PlanError
from policies.head import heads_of
from policies.homes import Homes, Source
from policies.placement import Placement
from policies.plan.check import BOOKED, KV_COVERAGE, PROJECTED, STORED_TWICE, UNSTORED, checked
from policies.plan.memory import Buffers, place
from policies.plan.op import Kind, Op, Scope
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_ops import Zigzag
from tests.policies_table import SCENARIOS, Planned, planned


@dataclass(frozen=True, slots=True)
class HalfInputs:
    """The first half of every sequence lies as layer inputs, the rest as KV."""

    name: str = "half-inputs"

    @property
    def buffers(self) -> Buffers:
        return HOW.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        inputs = tuple(heads_of(block, 0.5) for block in blocks)
        return place(model, hardware, blocks, self.buffers, inputs=inputs)

    def decide(self, ctx: StepContext) -> Decision:
        heads = ctx.placement.inputs[ctx.block.index]
        even = Decision((0,) * ctx.n_batches, (1,) * ctx.n_batches)
        return with_inputs(even, heads, ctx.n_stored, ctx.n_ctx())

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        return zigzag(ctx, now, then, HOW)


HOW = Zigzag(input_slots=2)
PLAN = planned(HalfInputs(), SCENARIOS["long"])


def check(plan: Planned) -> None:
    for _ in checked(plan.ops, plan.model, plan.placement, plan.blocks):
        pass


def first(matches: Callable[[Op], bool]) -> int:
    return next(i for i, op in enumerate(PLAN.ops) if matches(op))


def changed(index: int, *ops: Op) -> Planned:
    return replace(PLAN, ops=(*PLAN.ops[:index], *ops, *PLAN.ops[index + 1 :]))


def test_the_plan_has_all_three():
    check(PLAN)
    decode = [op for op in PLAN.ops if op.kind is Kind.FORWARD and op.step and op.n_project]
    assert decode
    assert {op.kind for op in PLAN.ops if op.scope is Scope.INPUT} == {
        Kind.LOAD_ACT,
        Kind.STORE_ACT,
    }
    booked = PLAN.placement.inputs[0]
    assert all(op.n_project == min(booked[op.batch], op.n_ctx) for op in decode)


def test_inputs_that_are_not_loaded_are_missed():
    at = first(lambda op: op.kind is Kind.LOAD_ACT and op.scope is Scope.INPUT)
    with pytest.raises(PlanError, match=r"L4|slots"):
        check(changed(at))


def test_a_forward_projects_what_was_loaded():
    at = first(lambda op: op.kind is Kind.FORWARD and op.n_project > 0)
    with pytest.raises(PlanError, match=PROJECTED):
        check(changed(at, replace(PLAN.ops[at], n_project=PLAN.ops[at].n_project - 1)))


def test_inputs_cannot_be_loaded_before_they_are_stored():
    at = first(lambda op: op.kind is Kind.STORE_ACT and op.scope is Scope.INPUT)
    with pytest.raises(PlanError, match=UNSTORED):
        check(changed(at))


def test_a_token_is_not_stored_twice():
    at = first(lambda op: op.kind is Kind.STORE_ACT and op.scope is Scope.INPUT)
    store = PLAN.ops[at]
    forward = next(op for op in reversed(PLAN.ops[:at]) if op.kind is Kind.FORWARD)
    kv_out = next(slot for slot in forward.writes if "kv out" in slot.name)
    home = next(slot for op in PLAN.ops for slot in op.writes
                if slot.name == f"host/kv/l{store.layer}/b{store.batch}")  # fmt: skip
    again = replace(
        store, kind=Kind.STORE_KV, scope=Scope.LAYER, part=9, reads=(kv_out,), writes=(home,)
    )
    with pytest.raises(PlanError, match=STORED_TWICE):
        check(changed(at, store, again))


def test_homes_hold_no_more_than_is_booked():
    fewer = tuple(tuple(n - 1 for n in row) for row in PLAN.placement.inputs)
    with pytest.raises(PlanError, match=BOOKED):
        check(replace(PLAN, placement=replace(PLAN.placement, inputs=fewer)))


def test_a_gap_between_head_and_tail_is_seen():
    at = first(lambda op: op.kind is Kind.LOAD_KV)
    short = replace(PLAN.ops[at], start=PLAN.ops[at].start + 1)
    with pytest.raises(PlanError, match=KV_COVERAGE):
        check(changed(at, short))


# ---- homes --------------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([Source.INPUT, Source.KV])), max_size=12
    )
)
def test_ranges_tile_what_is_stored(steps):
    """Against a list of single tokens."""
    homes, tokens = Homes(), []
    for n, source in steps:
        inputs = n if source is Source.INPUT else 0
        try:
            homes = homes.append(len(tokens) + n, inputs)
        except ValueError:
            kinds = [s for i, s in enumerate(tokens) if not i or tokens[i - 1] is not s]
            assert len([*kinds, source]) > 3  # a fifth range, or a fourth that begins with KV
            assert source is Source.INPUT
            break
        tokens += [source] * n
    assert homes.n_stored == len(tokens)
    assert homes.n_inputs == tokens.count(Source.INPUT)
    told = [piece.source for piece in homes.ranges(0, homes.n_stored)
            for _ in range(piece.start, piece.stop)]  # fmt: skip
    assert told == tokens
    for low in range(0, len(tokens), 3):
        cut = [p.source for p in homes.ranges(low, low + 4) for _ in range(p.start, p.stop)]
        assert cut == tokens[low : low + 4]


def test_heads_are_stored_as_inputs_and_the_rest_as_kv():
    decision = PLAN.decisions[0, 1]
    stored = with_inputs(decision, (5, 0, 100), (0, 0, 0), (10, 10, 10))
    assert stored.n_inputs == (5, 0, 10)
    later = with_inputs(decision, (5, 0, 100), (10, 10, 10), (11, 11, 11))
    assert later.n_inputs == (0, 0, 1)


def test_more_inputs_than_are_stored_are_refused():
    with pytest.raises(ValueError, match=r"decision\.n_inputs: 3 must be in 0\.\.2"):
        Homes.headed(0, 5).append(7, 3)
