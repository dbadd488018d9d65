"""The SimPy executor: the reference for what a plan means.

Every lane is a process that serves its ops one at a time in program order: it waits for what the
op depends on, lets the op's seconds pass, goes on with the next. A lane whose head waits does not
look at the ops behind it; that head-of-line blocking is how CUDA streams behave and is intended.
Only ops that somebody waits for get an event, so an op costs one timeout and a little more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from simpy import Environment, Event

from policies.cost.protocol import Costs, checked_seconds
from policies.plan.link import LinkedOp, link
from policies.plan.op import LANE_OF, Lane, Op
from policies.trace.span import Span, Trace
from sim.links import DuplexLink

PROGRESS_OPS = 1000
_DIRECTION = {Lane.H2D: 0, Lane.D2H: 1}


class Stalled(RuntimeError):
    """A simulation that cannot go on: ops are left and none of them can start.

    ``heads`` maps each lane that has ops left to the key of its first one and the keys that it
    waits for. A plan linked by ``policies.plan.link`` never stalls: it waits only for earlier ops.
    """

    def __init__(
        self, n_ended: int, n_ops: int, heads: Mapping[Lane, tuple[str, tuple[str, ...]]]
    ) -> None:
        self.n_ended = n_ended
        self.n_ops = n_ops
        self.heads = dict(heads)
        waits = "; ".join(
            f"{lane}: {key} waits for {', '.join(keys)}" for lane, (key, keys) in heads.items()
        )
        super().__init__(f"stalled after {n_ended} of {n_ops} ops: {waits}")


class SimBackend:
    """Runs plans against ``costs`` on a virtual clock; a ``Backend``.

    ``duplex`` is the rate, as a share, of H2D and D2H while both are busy (``sim.links``).
    ``progress`` is called with the number of ops ended so far, every ``PROGRESS_OPS`` ops and at
    the end. Each of seconds, bytes and FLOPs is asked once an op in program order, so costs that
    draw from a seeded generator give the same trace every time.
    """

    def __init__(
        self, costs: Costs, duplex: float = 1.0, progress: Callable[[int], None] | None = None
    ) -> None:
        if not 0.0 < duplex <= 1.0:
            raise ValueError(f"duplex: {duplex} must be in (0, 1], 1 is full duplex")
        self._costs = costs
        self._duplex = duplex
        self._progress = progress
        self.linked: list[LinkedOp] = []  # of the last run, for checks and attribution

    def run(self, ops: Iterable[Op]) -> Trace:
        """Spans of a plan, in program order; ``ValueError`` for a cost that is not a time."""
        return self.run_linked(link(ops))

    def run_linked(self, linked: Iterable[LinkedOp]) -> Trace:
        """The same for a plan that is linked already; ``Stalled`` if it waits in a circle."""
        self.linked = list(linked)
        seconds = [linked_seconds(self._costs, item, len(self.linked)) for item in self.linked]
        run = LaneRun(self._duplex, self._progress)
        run.add(self.linked, seconds)
        for lane, positions in run.lanes.items():
            if positions:
                run.env.process(run.serve(lane, positions))
        run.until_drained()
        return Trace(
            tuple(
                span_of(item.op, start_s, end_s, self._costs)
                for item, start_s, end_s in zip(self.linked, run.start_s, run.end_s, strict=True)
            )
        )


def span_of(op: Op, start_s: float, end_s: float, costs: Costs) -> Span:
    """The span of an op that has ended."""
    nbytes, flops = int(costs.nbytes(op)), float(costs.flops(op))
    return Span(op.key, op.kind, LANE_OF[op.kind], start_s, end_s, nbytes, flops)


def linked_seconds(costs: Costs, item: LinkedOp, n_ops: int) -> float:
    """Seconds of an op; ``ValueError`` if they are no time or it waits for an op not there."""
    seconds = checked_seconds(costs, item.op)
    for dep in item.deps:
        if not 0 <= dep < n_ops:
            raise ValueError(
                f"deps: op {item.op.key} waits for op {dep}, must be in 0..{n_ops - 1}"
            )
    return seconds


class LaneRun:
    """One run: the lanes' processes and the times that they record. A time of -1 is not yet."""

    def __init__(self, duplex: float, progress: Callable[[int], None] | None) -> None:
        self.start_s: list[float] = []
        self.end_s: list[float] = []
        self.lanes: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        self.env = Environment()
        self._linked: list[LinkedOp] = []
        self._seconds: list[float] = []
        self._progress = progress
        self._n_ended = 0
        self._waited: dict[int, Event] = {}  # ops that somebody waits for
        self._shared = DuplexLink(self.env, duplex) if duplex < 1.0 else None

    def add(self, linked: Sequence[LinkedOp], seconds: Sequence[float]) -> None:
        """The next ops of the plan, to be served when their lanes' processes come to them."""
        for item in linked:
            position = len(self._linked)
            if item.index != position:
                raise ValueError(
                    f"linked: op {item.op.key} has index {item.index}, must be {position}"
                )
            self._linked.append(item)
            self.lanes[LANE_OF[item.op.kind]].append(position)
        self._seconds += seconds
        self.start_s += [-1.0] * len(linked)
        self.end_s += [-1.0] * len(linked)

    def until_drained(self) -> None:
        """Run to the end; ``Stalled`` if the event queue drains before every op has ended."""
        self.env.run()
        if self._n_ended < len(self._linked):
            raise Stalled(self._n_ended, len(self._linked), self._heads())
        if self._progress is not None and self._n_ended % PROGRESS_OPS:
            self._progress(self._n_ended)

    def ending(self, index: int) -> Generator[Event, None, None]:
        """Wait until an op has ended; delegate to it (``yield from``)."""
        if self.end_s[index] < 0.0:
            yield self._end_of(index)

    def _end_of(self, index: int) -> Event:
        event = self._waited.get(index)
        if event is None:
            event = self._waited[index] = self.env.event()
        return event

    def serve(self, lane: Lane, positions: Sequence[int]) -> Generator[Event, None, None]:
        """The process of one lane: its ops at ``positions``, one after another."""
        env, linked, seconds = self.env, self._linked, self._seconds
        start_s, end_s, waited = self.start_s, self.end_s, self._waited
        direction = _DIRECTION.get(lane)
        shared = None if direction is None else self._shared
        for index in positions:
            for dep in linked[index].deps:
                # One after another is all of them: an event that has ended is not waited for.
                if end_s[dep] < 0.0:
                    yield self._end_of(dep)
            start_s[index] = env.now
            if shared is None or direction is None:
                yield env.timeout(seconds[index])
            else:
                yield from shared.copy(direction, seconds[index])
            end_s[index] = env.now
            self._n_ended += 1
            if self._progress is not None and self._n_ended % PROGRESS_OPS == 0:
                self._progress(self._n_ended)
            if index in waited:
                waited.pop(index).succeed()

    def _heads(self) -> dict[Lane, tuple[str, tuple[str, ...]]]:
        """First op left of each lane and what it waits for."""
        heads = {}
        for lane, positions in self.lanes.items():
            head = next((i for i in positions if self.end_s[i] < 0.0), None)
            if head is not None:
                _, op, deps = self._linked[head]
                left = tuple(self._linked[d].op.key for d in deps if self.end_s[d] < 0.0)
                heads[lane] = (op.key, left)
        return heads
