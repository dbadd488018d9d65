"""The closed loop against a device that only takes orders: threads that work off their queues.

What the CPU twin cannot show: ops end long after they were issued, and planning a step overlaps the
step before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

import pytest
import torch

from policies.cost.model import CostModel
from policies.drive import IN_FLIGHT, Decision, drive, drive_steps
from policies.plan.link import link
from policies.plan.op import LANE_OF, Kind, Lane, Op
from policies.spec.workload import Batch, Block
from policies.trace.check import check_causality, check_clock, check_keys
from policies.trace.span import Span, Trace
from real.closed_loop import ClosedLoop
from real.fed_lanes import FedRunner
from real.geometry import Geometry
from real.lanes import LaneRunner
from real.scan import Scan, scan
from tests.lossless.engine import in_dtype
from tests.policies_table import OPT, SMALL, FixedRecompute

MODEL = in_dtype(OPT, "float32")
BLOCKS = (Block(0, (Batch(4, 64),) * 2, 7), Block(1, (Batch(4, 32),), 3))
COSTS = CostModel(MODEL, SMALL, FixedRecompute().place(MODEL, SMALL, BLOCKS))
GEOMETRY = Geometry(MODEL, COSTS.placement, BLOCKS, torch.float32)
ORDERS = 8  # that a lane may have under way
COMPUTE_S, COPY_S = 4e-3, 1e-3


class Device:
    """Lanes as streams: a ``Clock`` whose ops end when a worker comes to them."""

    def __init__(self) -> None:
        self.queues: dict[Lane, SimpleQueue[Callable[[], object] | None]]
        self.queues = {lane: SimpleQueue() for lane in Lane}
        self.done: list[threading.Event] = []
        self.at: list[list[float]] = []
        self.lane = Lane.COMPUTE  # current, of the one thread that issues
        self.issued: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        self.base_s = 0.0
        self.workers = [threading.Thread(target=self.work, args=(lane,)) for lane in Lane]
        for worker in self.workers:
            worker.start()

    def work(self, lane: Lane) -> None:
        for order in iter(self.queues[lane].get, None):
            order()

    def close(self) -> None:
        for queue in self.queues.values():
            queue.put(None)
        for worker in self.workers:
            worker.join()

    def add(self, linked) -> None:  # type: ignore[no-untyped-def]
        self.done += [threading.Event() for _ in linked]
        self.at += [[0.0, 0.0] for _ in linked]

    def begin(self) -> None:
        self.base_s = time.perf_counter()

    def bind(self, lane: Lane) -> None:
        self.lane = lane

    def release(self) -> None:
        pass

    def wait(self, lane: Lane, index: int) -> None:
        self.queues[lane].put(self.done[index].wait)

    def start(self, lane: Lane, index: int) -> None:
        if len(self.issued[lane]) >= ORDERS:
            self.done[self.issued[lane][-ORDERS]].wait()
        self.issued[lane].append(index)
        self.queues[lane].put(lambda: self._note(index, 0))

    def end(self, lane: Lane, index: int) -> None:
        self.queues[lane].put(lambda: (self._note(index, 1), self.done[index].set()))

    def _note(self, index: int, which: int) -> None:
        self.at[index][which] = time.perf_counter()

    def drain(self) -> None:
        for lane in Lane:
            for index in self.issued[lane][:-1] if lane is Lane.COMPUTE else self.issued[lane]:
                self.done[index].wait()

    def is_async(self, _lane: Lane) -> bool:
        return True

    def await_end(self, index: int) -> None:
        self.done[index].wait()

    def has_ended(self, index: int) -> bool:
        return self.done[index].is_set()

    def time(self, index: int) -> tuple[float, float]:
        assert self.done[index].is_set(), "asked for the time of an op under way"
        first_s, last_s = self.at[index]
        return first_s - self.base_s, last_s - self.base_s

    def now_s(self) -> float:
        return time.perf_counter() - self.base_s

    def make(self, op: Op) -> Callable[[], object]:
        """Orders a few ms of work, most of it compute."""
        seconds = COMPUTE_S if LANE_OF[op.kind] is Lane.COMPUTE else COPY_S
        return lambda: self.queues[self.lane].put(lambda: time.sleep(seconds))

    def trace(self, linked) -> Trace:  # type: ignore[no-untyped-def]
        for done in self.done:
            done.wait()
        return Trace(
            tuple(Span(op.key, op.kind, op.lane, *self.time(i), 0, 0.0) for i, op, _ in linked)
        )


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


class Told(FixedRecompute):
    """Recomputes by turns; takes ``think_s`` to decide."""

    feedback = False
    think_s = 0.0

    def decide(self, ctx) -> Decision:  # type: ignore[no-untyped-def]
        time.sleep(self.think_s)
        return super().decide(ctx)


def closed(device: Device, policy: Told) -> tuple[Trace, ClosedLoop, Scan]:
    booked = scan(link(drive(FixedRecompute(policy.n_recompute), BLOCKS, COSTS)), GEOMETRY)
    found = Scan(GEOMETRY, [])
    runner = FedRunner(device, inline=True)
    loop = ClosedLoop(found, booked, device, runner, device.make, COSTS)

    def plan(ended) -> Iterator[Iterable[Op]]:  # type: ignore[no-untyped-def]
        return drive_steps(policy, BLOCKS, COSTS, ended=ended)

    loop.start(plan)
    device.begin()
    loop.run()
    return device.trace(found.linked), loop, found


def opened(policy: Told) -> Trace:
    device = Device()
    linked = list(link(drive(policy, BLOCKS, COSTS)))
    device.add(linked)
    device.begin()
    LaneRunner(linked, [device.make(item.op) for item in linked], device).run()
    trace = device.trace(linked)
    device.close()
    return trace


TURNS = (0, 16, 5)
N_STEPS = sum(block.max_new for block in BLOCKS)


def test_the_plan_is_that_of_the_open_loop_and_keeps_the_laws(device: Device) -> None:
    policy = Told(TURNS)
    trace, loop, found = closed(device, policy)
    assert [span.key for span in trace.spans] == [op.key for op in drive(policy, BLOCKS, COSTS)]
    check_keys(trace, found.linked)
    check_clock(trace, 0.0)
    check_causality(trace, found.linked, 0.0)
    assert len(loop.host_s) == len(loop.late_s()) == N_STEPS - IN_FLIGHT


def test_planning_beside_a_step_costs_no_time(device: Device) -> None:
    known = opened(Told(TURNS)).makespan_s
    brisk = type("Brisk", (Told,), {"think_s": 0.3 * known / N_STEPS})(TURNS)
    trace, loop, _ = closed(device, brisk)
    assert min(loop.host_s[:4]) > brisk.think_s
    assert trace.makespan_s < 1.2 * known  # a few threads share a busy machine
    assert sum(loop.late_s()) < 0.2 * known


def test_planning_that_takes_longer_than_a_step_is_seen(device: Device) -> None:
    known = opened(Told(TURNS)).makespan_s
    slow = type("Slow", (Told,), {"think_s": 3 * known / N_STEPS})(TURNS)
    trace, loop, _ = closed(device, slow)
    late_s = sum(loop.late_s())
    assert trace.makespan_s > 1.5 * known
    assert 0.5 * (trace.makespan_s - known) < late_s < trace.makespan_s
    assert min(loop.host_s) < slow.think_s < max(loop.host_s)


def test_a_belief_is_refitted_while_the_device_works(device: Device) -> None:
    """Decisions see a belief that the device's times made, and lanes go on meanwhile."""
    seen = []

    class Watching(Told):
        feedback = True

        def decide(self, ctx) -> Decision:  # type: ignore[no-untyped-def]
            seen.append(ctx.belief)
            return super().decide(ctx)

    closed(device, Watching(TURNS))
    first, last = seen[0], seen[-1]
    assert first is COSTS
    assert last is not COSTS
    load = next(op for op in drive(Told((0,)), BLOCKS, COSTS) if op.kind is Kind.LOAD_WEIGHT)
    assert last.seconds(load) < 0.5 * COSTS.seconds(load), "this device copies faster"
