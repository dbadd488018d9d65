"""A plan that is emitted while it runs: what closed-loop policies need, in simulation.

The generation loop is asked for a step only when the compute of the step two before it has ended,
so what it is told then is all that a decision may know. What readers get wrong: this costs no time.
Two steps are in flight, and while the later one computes no lane has run out of ops, so times are
those of a plan that was known at once (``sim.engine``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator

from simpy import Event

from policies.cost.protocol import Costs
from policies.drive import IN_FLIGHT
from policies.plan.link import LinkedOp, Linker
from policies.plan.op import LANE_OF, Lane, Op
from policies.trace.span import Span, Trace
from sim.engine import LaneRun, linked_seconds, span_of


class ClosedLoopBackend:
    """Runs plans step by step against ``costs``; arguments as in ``SimBackend``."""

    def __init__(
        self, costs: Costs, duplex: float = 1.0, progress: Callable[[int], None] | None = None
    ) -> None:
        self._costs, self._duplex, self._progress = costs, duplex, progress
        self._run = LaneRun(duplex, progress)
        self.linked: list[LinkedOp] = []  # of the last run
        self._spans: dict[int, Span] = {}  # of the last run: those that were asked for
        self._open: list[int] = []  # ops of the last run not asked for
        self._earlier: list[tuple[Op, Span]] = []  # of the runs before, not asked for

    def run(self, steps: Iterable[Iterable[Op]]) -> Trace:
        """Spans of a block of steps, in program order."""
        if self._open:
            self._earlier += [(self.linked[i].op, self._span(i)) for i in self._open]
        self.linked, self._spans, self._open = [], {}, []
        self._run = run = LaneRun(self._duplex, self._progress)
        fed = [run.env.event()]
        pieces: list[dict[Lane, list[int]]] = []
        run.env.process(self._feed(iter(steps), fed, pieces))
        for lane in Lane:
            run.env.process(_serve_steps(run, lane, fed, pieces))
        run.until_drained()
        return Trace(tuple(map(self._span, range(len(self.linked)))))

    def ended(self, block: int, step: int) -> list[tuple[Op, Span]]:
        """For ``policies.drive.drive_steps``: what has ended, of steps that old or older."""
        news, self._earlier = self._earlier, []
        left = []
        for index in self._open:
            op = self.linked[index].op
            if (op.block, op.step) <= (block, step) and self._run.end_s[index] >= 0.0:
                news.append((op, self._span(index)))
            else:
                left.append(index)
        self._open = left
        return news

    def _feed(
        self,
        steps: Iterator[Iterable[Op]],
        fed: list[Event],
        pieces: list[dict[Lane, list[int]]],
    ) -> Generator[Event, None, None]:
        """The process that asks for steps; ``fed[n]`` happens when step n is there."""
        linker, run = Linker(), self._run
        computes: list[int] = []  # the last compute of every step
        while True:
            if len(computes) >= IN_FLIGHT:
                yield from run.ending(computes[-IN_FLIGHT])
            ops = next(steps, None)
            if ops is None:
                return
            piece: dict[Lane, list[int]] = {lane: [] for lane in Lane}
            for op in ops:
                item = linker.link(op)
                self.linked.append(item)
                self._open.append(item.index)
                run.add((item,), (linked_seconds(self._costs, item, item.index + 1),))
                piece[LANE_OF[op.kind]].append(item.index)
            if not piece[Lane.COMPUTE]:
                raise ValueError(f"steps: step {len(computes)} computes nothing")
            computes.append(piece[Lane.COMPUTE][-1])
            pieces.append(piece)
            fed.append(run.env.event())
            fed[-2].succeed()

    def _span(self, index: int) -> Span:
        span = self._spans.get(index)
        if span is None:
            op, run = self.linked[index].op, self._run
            span = span_of(op, run.start_s[index], run.end_s[index], self._costs)
            self._spans[index] = span
        return span


def _serve_steps(
    run: LaneRun, lane: Lane, fed: list[Event], pieces: list[dict[Lane, list[int]]]
) -> Generator[Event, None, None]:
    """The process of one lane: its ops of one step after another, as they are there."""
    n = 0
    while True:
        yield fed[n]  # the one behind the last step never happens
        yield from run.serve(lane, pieces[n][lane])
        n += 1
