"""Arrivals: when each turn reaches the fleet.

``poisson``: ``rate`` is requests per second, as in the kappa paper's tables, so conversations start
at rate / (mean turns) and turn i + 1 comes ``think_s`` after turn i has ended. ``open``: Poisson at
``rate`` too, but every turn by itself, in file order, as a benchmark client replays a data set.
``trace``: the trace's own times, whatever happens meanwhile. ``closed``: ``n_clients``
conversations at a time. ``backlog``: all at time 0, in file order, every turn by itself. What
readers get wrong: only with ``poisson`` and ``closed`` does a slow server slow its clients down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
from simpy import Environment, Event

from sim.sessions import Sessions, Turn

MODES = ("poisson", "open", "trace", "closed", "backlog")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How turns arrive; ``speedup`` divides the times of a trace, ``shuffle`` mixes its order."""

    mode: str = "poisson"
    rate: float = 1.0
    think_s: float = 5.0
    n_clients: int = 64
    speedup: float = 1.0
    shuffle: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"serve.arrivals: {self.mode!r} is none of {', '.join(MODES)}")
        for name in ("rate", "speedup"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"serve.{name}: {value} must be a finite number > 0")
        if not self.think_s >= 0:
            raise ValueError(f"serve.think_s: {self.think_s} must be >= 0")
        if self.n_clients < 1:
            raise ValueError(f"serve.n_clients: {self.n_clients} must be >= 1")


class Clients:
    """The processes that submit turns; ``ended`` is to be told when a turn has ended."""

    def __init__(
        self,
        env: Environment,
        arrivals: Arrivals,
        sessions: Sessions,
        submit: Callable[[Turn], None],
        rng: np.random.Generator,
    ) -> None:
        if arrivals.mode == "trace" and not sessions.timed:
            raise ValueError(
                f"serve.arrivals: 'trace' needs a column arrival_ms, {sessions.source} has none"
            )
        self._env = env
        self._arrivals = arrivals
        self._submit = submit
        self._chained = arrivals.mode in ("poisson", "closed")
        starts = list(sessions.heads if self._chained else sessions.turns)
        if arrivals.shuffle:
            starts = [starts[i] for i in rng.permutation(len(starts))]
        self._heads = iter(starts)
        if arrivals.mode in ("poisson", "open"):
            chained = sessions.turns_per_head if self._chained else 1.0
            head_rate = arrivals.rate / chained
            gaps = rng.exponential(1.0 / head_rate, len(starts))
            times = np.cumsum(gaps).tolist()
            env.process(self._timetable(list(zip(times, starts, strict=True))))
        elif arrivals.mode == "trace":
            ordered = sorted(starts, key=lambda turn: turn.arrival_s)
            env.process(self._timetable([(t.arrival_s / arrivals.speedup, t) for t in ordered]))
        elif arrivals.mode == "closed":
            self._after(0.0, lambda: self._first_heads(arrivals.n_clients))
        else:
            self._after(0.0, lambda: self._all(starts))

    def ended(self, turn: Turn) -> None:
        """The next turn of the conversation, or the next conversation of a closed loop, is due."""
        if not self._chained:
            return
        following = turn.next_turn
        if following is not None:
            self._after(self._arrivals.think_s, lambda: self._submit(following))
        elif self._arrivals.mode == "closed":
            self._after(self._arrivals.think_s, self._next_head)

    def _first_heads(self, n: int) -> None:
        for _ in range(n):
            self._next_head()

    def _all(self, turns: list[Turn]) -> None:
        for turn in turns:
            self._submit(turn)

    def _next_head(self) -> None:
        head = next(self._heads, None)
        if head is not None:
            self._submit(head)

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        timeout = self._env.timeout(delay_s)
        timeout.callbacks.append(lambda _: action())

    def _timetable(self, entries: list[tuple[float, Turn]]) -> Generator[Event, None, None]:
        env = self._env
        for at_s, turn in entries:
            if at_s > env.now:
                yield env.timeout(at_s - env.now)
            self._submit(turn)
        if not entries:
            yield env.timeout(0.0)
