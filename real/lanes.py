"""Lanes: ops are issued in program order, by one thread a lane or by one for all.

An op of a CUDA lane is issued as soon as what it waits for has been *issued*: its stream waits for
the events, and the thread goes on. An op of a host lane (disk, CPU) runs on its thread, so who
waits for one waits for its end. A plan without host lanes needs no threads: program order issues
whatever an op waits for before it, and handing the interpreter from lane to lane costs up to
milliseconds per synchronisation. What readers get wrong: on the CPU twin every lane is a host lane;
the same threads and the same waits run there, only nothing is asynchronous.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from policies.plan.link import LinkedOp
from policies.plan.op import LANE_OF, Kind, Lane

Run = Callable[[], object]

SWITCH_S = 50e-6  # of the interpreter: a lane must not wait 5 ms for another one's Python


class Stopped(Exception):
    """Another lane failed; this one ends without a word of its own."""


class Progress:
    """How many of a lane's ops have been issued (CUDA) or have ended (host)."""

    def __init__(self, stop: threading.Event) -> None:
        self._count = 0
        self._stop = stop
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Ops so far."""
        return self._count

    def advance(self) -> None:
        """One more op."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Block until ``count`` ops are done; ``Stopped`` if the run failed."""
        if self._count >= count:
            return
        with self._changed:
            while self._count < count:
                if self._stop.is_set():
                    raise Stopped
                self._changed.wait()

    def wake(self) -> None:
        """Let waiting lanes see that the run has stopped."""
        with self._changed:
            self._changed.notify_all()


class Clock(Protocol):
    """Marks the start and the end of ops, and orders lanes, on one kind of device."""

    def add(self, linked: Sequence[LinkedOp]) -> None:
        """The next ops of the plan, not yet issued."""
        ...

    def bind(self, lane: Lane) -> None:
        """Make the calling thread the one that issues for ``lane``."""
        ...

    def release(self) -> None:
        """Give the calling thread its own stream back."""
        ...

    def wait(self, lane: Lane, index: int) -> None:
        """Make ``lane`` wait for the end of op ``index``, which was issued on a CUDA lane."""
        ...

    def start(self, lane: Lane, index: int) -> None:
        """Op ``index`` starts here."""
        ...

    def end(self, lane: Lane, index: int) -> None:
        """Op ``index`` ends here."""
        ...

    def drain(self) -> None:
        """Wait, blocking, until the device is idle."""
        ...

    def is_async(self, lane: Lane) -> bool:
        """Whether ops of ``lane`` are only issued by its thread."""
        ...

    def await_end(self, index: int) -> None:
        """Block the calling thread until op ``index``, which was issued, has ended."""
        ...

    def has_ended(self, index: int) -> bool:
        """Whether op ``index``, which was issued, has ended."""
        ...

    def time(self, index: int) -> tuple[float, float]:
        """Start and end of an op that has ended in seconds since ``begin``; asked in lane order."""
        ...

    def now_s(self) -> float:
        """Host time in seconds since ``begin``."""
        ...


@dataclass(slots=True)
class ReadyOp:
    """One op, ready to run, and what it waits for."""

    index: int
    run: Run
    waits: list[tuple[Progress, int]] = field(default_factory=list)  # ops of a lane to see done
    events: list[int] = field(default_factory=list)  # ops whose end the lane waits for
    fence: bool = False


class Lanes:
    """What runners share: lanes that issue their ops and tell each other how far they are."""

    def __init__(self, clock: Clock, delay: Callable[[Lane], None] | None) -> None:
        self._clock, self._delay = clock, delay
        self._stop = threading.Event()
        self._progress = {lane: Progress(self._stop) for lane in Lane}
        self._failure: BaseException | None = None
        self._position: list[tuple[Lane, int]] = []  # lane and place in it of every op
        self._n = dict.fromkeys(Lane, 0)

    def _steps_of(
        self, linked: Sequence[LinkedOp], runs: Sequence[Run]
    ) -> Iterator[tuple[Lane, ReadyOp]]:
        """The next ops of the plan, each with what it waits for."""
        for (index, op, deps), run in zip(linked, runs, strict=True):
            lane = LANE_OF[op.kind]
            step = ReadyOp(index, run, fence=op.kind is Kind.FENCE)
            for dep in deps:
                of, place = self._position[dep]
                step.waits.append((self._progress[of], place + 1))
                if self._clock.is_async(of):
                    step.events.append(dep)
            self._position.append((lane, self._n[lane]))
            self._n[lane] += 1
            yield lane, step

    def _run_inline(self, order: Iterable[tuple[Lane, ReadyOp]]) -> None:
        """One thread issues everything; a stream is made current only where it changes."""
        current: Lane | None = None
        try:
            with torch.inference_mode():
                for lane, step in order:
                    if lane is not current:
                        self._clock.bind(lane)
                        current = lane
                    self._issue(lane, step)
        finally:
            self._clock.release()

    def _run_threads(self, steps: Mapping[Lane, Iterable[ReadyOp]]) -> None:
        # Compute stays on the thread that warmed it up: libraries keep plans per thread.
        lanes = dict(steps)
        compute = lanes.pop(Lane.COMPUTE, ())
        threads = [
            threading.Thread(target=self._serve, args=(lane, mine), name=f"lane {lane}")
            for lane, mine in lanes.items()
        ]
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            for thread in threads:
                thread.start()
            self._serve(Lane.COMPUTE, compute)
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
            self._clock.release()

    def _fail(self, error: BaseException) -> None:
        """Stop all lanes; ``error`` is raised by the caller's thread."""
        if self._failure is None:
            self._failure = error
        self._stop.set()
        for progress in self._progress.values():
            progress.wake()

    def _serve(self, lane: Lane, steps: Iterable[ReadyOp]) -> None:
        try:
            with torch.inference_mode():
                self._clock.bind(lane)
                self._loop(lane, steps)
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)

    def _loop(self, lane: Lane, steps: Iterable[ReadyOp]) -> None:
        advance = self._progress[lane].advance
        for step in steps:
            for progress, count in step.waits:
                progress.wait(count)
            self._issue(lane, step)
            advance()

    def _issue(self, lane: Lane, step: ReadyOp) -> None:
        """Run one op, or put it on its stream, behind what it waits for."""
        clock = self._clock
        for dep in step.events:
            clock.wait(lane, dep)
        if self._delay is not None:
            self._delay(lane)
        clock.start(lane, step.index)
        if step.fence:
            clock.drain()
        step.run()
        clock.end(lane, step.index)


class LaneRunner(Lanes):
    """Runs prepared ops on their lanes' threads.

    ``runs[i]`` executes op ``linked[i]``. ``delay(lane)`` is called before every op of a lane;
    tests sleep in it.
    """

    def __init__(
        self,
        linked: Sequence[LinkedOp],
        runs: Sequence[Run],
        clock: Clock,
        delay: Callable[[Lane], None] | None = None,
    ) -> None:
        super().__init__(clock, delay)
        self._order = list(self._steps_of(linked, runs))

    def run(self) -> None:
        """Run all ops; the first error of a lane is raised here."""
        lanes: dict[Lane, list[ReadyOp]] = {}
        for lane, step in self._order:
            lanes.setdefault(lane, []).append(step)
        if all(map(self._clock.is_async, lanes)):
            self._run_inline(self._order)
        else:
            self._run_threads(lanes)
        if self._failure is not None:
            raise self._failure


class HostClock:
    """The CPU twin: every lane is a host lane, and time is the host's."""

    def __init__(self, n_ops: int = 0) -> None:
        self._start_s = [0.0] * n_ops
        self._end_s = [0.0] * n_ops
        self._base_s = 0.0

    def add(self, linked: Sequence[LinkedOp]) -> None:
        """Room for the times of more ops."""
        self._start_s += [0.0] * len(linked)
        self._end_s += [0.0] * len(linked)

    def forget(self) -> None:
        """Back to no ops."""
        self._start_s, self._end_s = [], []

    def begin(self) -> None:
        """Time zero is now."""
        self._base_s = time.perf_counter()

    def bind(self, lane: Lane) -> None:
        """Nothing to bind."""

    def release(self) -> None:
        """Nothing to give back."""

    def wait(self, lane: Lane, index: int) -> None:
        """Never called: no lane is asynchronous."""
        raise AssertionError(f"clock: {lane} waits for an event of op {index} on the CPU twin")

    def start(self, lane: Lane, index: int) -> None:  # noqa: ARG002
        """Host time at the start."""
        self._start_s[index] = time.perf_counter()

    def end(self, lane: Lane, index: int) -> None:  # noqa: ARG002
        """Host time at the end."""
        self._end_s[index] = time.perf_counter()

    def drain(self) -> None:
        """Every earlier op has ended: the fence waited for it."""

    def is_async(self, lane: Lane) -> bool:  # noqa: ARG002
        """No lane is."""
        return False

    def await_end(self, index: int) -> None:
        """Its thread has run it."""

    def has_ended(self, index: int) -> bool:  # noqa: ARG002
        """Its thread has run it."""
        return True

    def time(self, index: int) -> tuple[float, float]:
        """Start and end of an op in seconds since ``begin``."""
        return self._start_s[index] - self._base_s, self._end_s[index] - self._base_s

    def now_s(self) -> float:
        """Seconds since ``begin``."""
        return time.perf_counter() - self._base_s

    def times(self) -> list[tuple[float, float]]:
        """Start and end of every op in seconds since ``begin``."""
        base_s = self._base_s
        return [(a - base_s, b - base_s) for a, b in zip(self._start_s, self._end_s, strict=True)]
