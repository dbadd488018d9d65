"""Lanes whose plan comes while they run, from a thread of its own.

What readers get wrong: the thread that issues cannot also plan. The device holds it up (a lane may
have few ops under way) until almost the end of a step, and the next one would come too late.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch

from policies.plan.link import LinkedOp
from policies.plan.op import Lane
from real.lanes import SWITCH_S, Clock, Lanes, ReadyOp, Run, Stopped

Piece = list[tuple[Lane, ReadyOp]]


class FedRunner(Lanes):
    """Runs ops that are given while earlier ones run.

    ``inline``: one thread issues all, because no lane that the plan may use is a host lane.
    """

    def __init__(
        self, clock: Clock, delay: Callable[[Lane], None] | None = None, *, inline: bool
    ) -> None:
        super().__init__(clock, delay)
        self._inline = inline
        keys = [None] if inline else list(Lane)
        self._queues: dict[Lane | None, SimpleQueue[Piece | None]]
        self._queues = {key: SimpleQueue() for key in keys}

    def give(self, linked: Sequence[LinkedOp], runs: Sequence[Run]) -> None:
        """The next ops of the plan."""
        pieces: dict[Lane | None, Piece] = {}
        for lane, step in self._steps_of(linked, runs):
            pieces.setdefault(None if self._inline else lane, []).append((lane, step))
        for key, piece in pieces.items():
            self._queues[key].put(piece)

    def run(self, feed: Callable[[], None]) -> None:
        """Run what is given; ``feed`` gives the rest, on a thread of its own, and returns.

        The first error of a lane, or of ``feed``, is raised here.
        """
        feeder = threading.Thread(target=self._feed, args=(feed,), name="feeder")
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        feeder.start()
        try:
            if self._inline:
                self._run_inline(self._given(None))
            else:
                self._run_threads({lane: (step for _, step in self._given(lane)) for lane in Lane})
        except BaseException as error:
            self._fail(error)
        finally:
            feeder.join()
            sys.setswitchinterval(before)
        if self._failure is not None:
            raise self._failure

    def await_end(self, index: int) -> None:
        """Block the feeder until an op has ended; ``Stopped`` if the run failed."""
        lane, place = self._position[index]
        self._progress[lane].wait(place + 1)
        self._clock.await_end(index)

    def has_ended(self, index: int) -> bool:
        """Whether an op that was given has ended."""
        lane, place = self._position[index]
        return self._progress[lane].count > place and self._clock.has_ended(index)

    def _feed(self, feed: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                feed()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._end()

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._end()

    def _end(self) -> None:
        """Nothing more is given."""
        for queue in self._queues.values():
            queue.put(None)

    def _given(self, key: Lane | None) -> Iterator[tuple[Lane, ReadyOp]]:
        """Ops of a lane, or of all, as they come."""
        for piece in iter(self._queues[key].get, None):
            for lane, step in piece:
                yield lane, step
                if self._inline:  # back here, so it was issued; a lane's thread says so itself
                    self._progress[lane].advance()
