from __future__ import annotations

import threading

import pytest

from policies.plan.link import link
from policies.plan.op import Kind, Op, Slot, Tier
from real.lanes import HostClock, LaneRunner

A = Slot("gpu/a", Tier.GPU)
B = Slot("host/b", Tier.HOST)


def plan(n: int) -> list[Op]:
    """Loads and forwards that alternate through one slot, then a fence and a disk read."""
    ops = []
    for i in range(n):
        ops.append(Op(Kind.LOAD_KV, 0, 0, i, reads=(B,), writes=(A,)))
        ops.append(Op(Kind.FORWARD, 0, 0, i, reads=(A,), writes=(B,)))
    return [*ops, Op(Kind.FENCE, 0, 0, n), Op(Kind.READ_KV, 0, 0, n)]


def test_ops_run_after_what_they_wait_for() -> None:
    linked = list(link(plan(20)))
    done: list[int] = []
    clock = HostClock(len(linked))
    LaneRunner(linked, [lambda i=i: done.append(i) for i, _, _ in linked], clock).run()
    assert done == list(range(len(linked)))
    for (start_s, end_s), (_, _, deps) in zip(clock.times(), linked, strict=True):
        assert start_s <= end_s
        assert all(clock.times()[dep][1] <= start_s for dep in deps)


def test_an_error_of_one_lane_ends_all() -> None:
    linked = list(link(plan(5)))

    def fail() -> None:
        raise RuntimeError("broken copy")

    runs = [fail if op.key.startswith("load_kv/g0/s0/l3") else int for _, op, _ in linked]
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="broken copy"):
        LaneRunner(linked, runs, HostClock(len(linked))).run()
    assert threading.active_count() == before
