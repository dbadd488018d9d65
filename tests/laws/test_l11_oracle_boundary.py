"""L11: a policy cannot read true response lengths, because no type that it is given has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from policies.cost.model import CostModel
from policies.drive import StepContext, drive
from policies.spec.workload import Batch, Block, Lengths
from sim.pack import Job, pack
from tests.policies_table import OPT, POLICIES, SMALL

# Words for what only the future knows. ``max_new`` is the cap, which is a setting.
FORBIDDEN = ("response", "gen_len", "output_len", "true_len", "lengths", "clock", "now_s")


def reached(cls: type, seen: set[type] | None = None) -> Iterator[tuple[type, str]]:
    """All fields of a dataclass and of the dataclasses in their annotations, recursively."""
    seen = set() if seen is None else seen
    if cls in seen:
        return
    seen.add(cls)
    hints = get_type_hints(cls)
    for item in fields(cls):
        yield cls, item.name
        for part in flatten(hints[item.name]):
            if isinstance(part, type) and is_dataclass(part):
                yield from reached(part, seen)


def flatten(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from flatten(part)


def leaks(cls: type) -> list[str]:
    """Fields through which a true length could be read."""
    return [
        f"{owner.__name__}.{name}"
        for owner, name in reached(cls)
        if owner is Lengths or any(word in name for word in FORBIDDEN)
    ]


@pytest.mark.parametrize("cls", [StepContext, Block, Batch])
def test_types_do_not_have_it(cls):
    assert leaks(cls) == []


def test_the_walk_reaches_what_it_should():
    names = {f"{owner.__name__}.{name}" for owner, name in reached(StepContext)}
    assert {"Block.max_new", "Batch.prompt_len", "ModelSpec.n_layers", "Shares.gpu"} <= names


def test_cost_model_holds_no_workload():
    """The belief is no dataclass, so the walk stops there; its constructor takes no job."""
    hints = get_type_hints(CostModel.__init__)
    assert all(leaks(part) == [] for part in hints.values() if is_dataclass(part))
    assert set(hints) == {"model", "hardware", "placement", "return"}


def test_leaking_type_is_named():
    peeking = make_dataclass("Peeking", [("block", Block), ("response_tokens", tuple[int, ...])])
    assert leaks(peeking) == ["Peeking.response_tokens"]

    @dataclass(frozen=True)
    class Careless:
        members: tuple[Lengths, ...]

    assert leaks(Careless) == ["Lengths.prompt_tokens", "Lengths.response_tokens"]
    assert leaks(Job)


def plan_of(policy, requests: list[Lengths], max_new: int):
    job = pack(requests, 2, 2, max_new, lambda _block: True, 4096, False)
    blocks = policy.blocks(job.blocks)
    placement = policy.place(OPT, SMALL, blocks)
    return job, list(drive(policy, blocks, CostModel(OPT, SMALL, placement)))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "tightllm"])
def test_lengths_below_the_cap_do_not_change_the_plan(name):
    """One member of each block reaches the cap; how long the others run is nobody's business."""
    prompts = (90, 80, 70, 60, 50, 40, 30, 20)
    short = [Lengths(p, 5 if i % 4 == 0 else 1) for i, p in enumerate(prompts)]
    long = [Lengths(p, 9 if i % 4 == 0 else 4) for i, p in enumerate(prompts)]
    one, first = plan_of(POLICIES[name], short, 5)
    two, second = plan_of(POLICIES[name], long, 5)
    assert one.decode_tokens != two.decode_tokens
    assert first == second


def test_clairvoyant_policy_is_noticed():
    """The same comparison fails for a policy that was told the lengths."""
    prompts = (90, 80, 70, 60)
    short = [Lengths(p, 5 if i == 0 else 1) for i, p in enumerate(prompts)]
    long = [Lengths(p, 5 if i == 0 else 4) for i, p in enumerate(prompts)]

    def clairvoyant(requests):
        policy = POLICIES["recompute-one"]
        return replace(policy, n_recompute=tuple(r.response_tokens for r in requests))

    first, second = (plan_of(clairvoyant(r), r, 5)[1] for r in (short, long))
    assert first != second
