"""Closed loop on a device: a plan that is emitted while it runs.

The generation loop is asked for a step when the compute of the step two before it has ended, while
the one in between runs; that is what a decision may know (as in ``sim.closed_loop``). Buffers,
streams and kernels are ready before the run, for all that may be decided in it. What readers get
wrong: planning is real work. It is no bubble only as long as it takes less than a step, so its time
is kept for every step, and how late each step came.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

from policies.cost.protocol import Costs
from policies.drive import IN_FLIGHT, Ended
from policies.plan.link import Linker
from policies.plan.op import LANE_OF, Lane, Op
from policies.trace.span import Span
from real.fed_lanes import FedRunner
from real.lanes import Clock, Run
from real.scan import Scan, check_within, extend

Plan = Callable[[Ended], Iterator[Iterable[Op]]]
"""Steps of a plan, each to be used up before the next is asked for."""

_PACE = (Lane.COMPUTE, Lane.H2D)  # lanes that should never run out of ops


class ClosedLoop:
    """One run. ``found`` grows with the plan and must stay within ``booked``."""

    def __init__(
        self,
        found: Scan,
        booked: Scan,
        clock: Clock,
        runner: FedRunner,
        make: Callable[[Op], Run],
        costs: Costs,
    ) -> None:
        self._found, self._booked = found, booked
        self._clock, self._runner, self._make, self._costs = clock, runner, make, costs
        self._linker = Linker()
        self._steps: Iterator[Iterable[Op]] = iter(())
        self._computes: list[int] = []  # the last compute of every step
        self._open: list[int] = []  # ops that were not asked for
        self._given: list[tuple[int, float]] = []  # first op of a step and when it was given
        self.host_s: list[float] = []  # planning of each step that was planned during the run

    def start(self, plan: Plan) -> None:
        """Plan the first steps, before the clock starts: nothing has been measured."""
        self._steps = plan(self.ended)
        for _ in range(IN_FLIGHT):
            self._next()

    def run(self) -> None:
        """Run the whole plan; the first error of a lane, or of planning, is raised here."""
        collects = gc.isenabled()
        gc.disable()  # it would stop all threads for as long as a layer takes
        try:
            self._runner.run(self._feed)
        finally:
            if collects:
                gc.enable()

    def ended(self, block: int, step: int) -> list[tuple[Op, Span]]:
        """For ``policies.drive.drive_steps``: what has ended, of steps that old or older."""
        news: list[tuple[Op, Span]] = []
        left: list[int] = []
        under_way: set[Lane] = set()  # lanes whose first op that has not ended was seen
        for index in self._open:
            op = self._found.linked[index].op
            lane = LANE_OF[op.kind]
            if lane in under_way or not self._runner.has_ended(index):
                under_way.add(lane)
                left.append(index)
                continue
            times = self._clock.time(index)  # of each lane in order, whatever is asked for
            if (op.block, op.step) <= (block, step):
                news.append((op, self._span(op, times)))
            else:
                left.append(index)
        self._open = left
        return news

    def late_s(self) -> list[float]:
        """By how much each step that was planned during the run came after compute, or H2D, had run
        out of ops: at most so long was the bubble. 0 is in time.
        """
        late: list[float] = []
        last: dict[Lane, int] = {}
        at = 0
        for first, given_s in self._given:
            for item in self._found.linked[at:first]:
                last[LANE_OF[item.op.kind]] = item.index
            at = first
            dry_s = [self._clock.time(last[lane])[1] for lane in _PACE if lane in last]
            late.append(max(0.0, given_s - min(dry_s, default=given_s)))
        return late

    def _feed(self) -> None:
        while True:
            if len(self._computes) >= IN_FLIGHT:
                self._runner.await_end(self._computes[-IN_FLIGHT])
            start_s, first = self._clock.now_s(), len(self._found.linked)
            if not self._next():
                return
            if len(self._found.linked) > first:
                given_s = self._clock.now_s()
                self.host_s.append(given_s - start_s)
                self._given.append((first, given_s))

    def _next(self) -> bool:
        """Plan the next step and give it to the lanes; False if there is none."""
        ops = next(self._steps, None)
        if ops is None:
            return False
        linked = extend(self._found, map(self._linker.link, ops))
        if not linked:
            return True  # it is not to be run
        check_within(self._found, self._booked)
        runs = [self._make(item.op) for item in linked]
        computes = [item.index for item in linked if LANE_OF[item.op.kind] is Lane.COMPUTE]
        if not computes:
            raise ValueError(f"steps: step {len(self._computes)} computes nothing")
        self._computes.append(computes[-1])
        self._open += [item.index for item in linked]
        self._clock.add(linked)
        self._runner.give(linked, runs)
        return True

    def _span(self, op: Op, times: tuple[float, float]) -> Span:
        nbytes, flops = self._costs.nbytes(op), self._costs.flops(op)
        return Span(op.key, op.kind, LANE_OF[op.kind], *times, nbytes, flops)
