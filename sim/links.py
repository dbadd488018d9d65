"""Duplex contention: an H2D and a D2H copy that run at once slow each other down.

While both directions are busy each copy progresses at ``duplex`` times its own speed; alone it runs
at full speed. This is exact processor sharing: at every start and stop the work left in the other
direction is brought up to date and its end is set anew, nothing is polled. What readers get
wrong: the slow-down lasts only for the overlap, so two equal copies started together take ``t /
duplex`` each, and copies that overlap in part pay in part.
"""

from __future__ import annotations

from collections.abc import Generator

from simpy import Environment, Event, Interrupt, Process


class DuplexLink:
    """The two directions of one link; each carries at most one copy at a time."""

    def __init__(self, env: Environment, duplex: float) -> None:
        if not 0.0 < duplex <= 1.0:
            raise ValueError(f"duplex: {duplex} must be in (0, 1], 1 is full duplex")
        self._env = env
        self._duplex = duplex
        self._copying: list[Process | None] = [None, None]

    def copy(self, direction: int, seconds: float) -> Generator[Event, None, None]:
        """Carry one copy of ``seconds`` (uncontended) in ``direction`` 0 or 1; ends when it ends.

        To be delegated to (``yield from``) by the process of that direction's lane.
        """
        if self._copying[direction] is not None:
            raise RuntimeError(f"duplex link: direction {direction} already carries a copy")
        other = 1 - direction
        self._copying[direction] = self._env.active_process
        self._wake(other)
        left_s = seconds
        while True:
            rate = 1.0 if self._copying[other] is None else self._duplex
            since_s = self._env.now
            try:
                yield self._env.timeout(left_s / rate)
                break
            except Interrupt:
                # An interrupt at the very end may leave -1e-17 s of work; a timeout rejects that.
                # Even without work left the copy waits for its timeout: the link may be about to
                # interrupt it again at this instant, and only a waiting copy handles that.
                left_s = max(0.0, left_s - (self._env.now - since_s) * rate)
        self._copying[direction] = None
        self._wake(other)

    def _wake(self, direction: int) -> None:
        """Let the copy in ``direction``, if there is one, account for a change of its rate."""
        process = self._copying[direction]
        if process is not None:
            process.interrupt()
