"""CUDA streams and events: one stream a lane, two timing events an op, made before the run.

Host lanes have no stream: their times are the host's, aligned with the device at one instant when
both are idle. What readers get wrong: CUDA reports the time between two events as a float32 of
milliseconds, which over minutes is coarser than an op; so times are summed over short hops from one
op of a lane to a later one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from policies.plan.link import LinkedOp
from policies.plan.op import LANE_OF, Lane

CUDA_LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H)
_HOP_S = 1.0
# Ops that a lane may have under way. Far enough to never run dry; and a stream whose queue is full
# would block its thread in a call that keeps the interpreter to itself.
_AHEAD = 32


class CudaClock:
    """Streams of the CUDA lanes and the events of all their ops."""

    def __init__(self, linked: Sequence[LinkedOp], device: torch.device) -> None:
        self._device = device
        self.streams = {lane: torch.cuda.Stream(device) for lane in CUDA_LANES}
        self._issued: dict[Lane, deque[int]] = {lane: deque() for lane in CUDA_LANES}
        self._base = _event(self.streams[Lane.COMPUTE])
        self._base_s = 0.0
        self.forget()
        self.add(linked)
        for lane, start, end in zip(self._lane, self._starts, self._ends, strict=True):
            for event in (start, end):
                if event is not None:
                    event.record(self.streams[lane])  # makes it

    def forget(self) -> None:
        """Back to no ops, on the same streams."""
        self._lane: list[Lane] = []
        self._starts: list[torch.cuda.Event | None] = []
        self._ends: list[torch.cuda.Event | None] = []
        self._host_s: list[list[float]] = []
        self._times: dict[int, tuple[float, float]] = {}
        self._origin: dict[Lane, tuple[torch.cuda.Event, float]] = {}

    def add(self, linked: Sequence[LinkedOp]) -> None:
        """Events of more ops; those that are added during a run are made when first recorded."""
        for item in linked:
            lane = LANE_OF[item.op.kind]
            for events in (self._starts, self._ends):
                events.append(torch.cuda.Event(enable_timing=True) if lane in CUDA_LANES else None)
            self._host_s.append([0.0, 0.0])
            self._lane.append(lane)

    def begin(self) -> None:
        """Time zero is now, on an idle device."""
        torch.cuda.synchronize(self._device)
        for issued in self._issued.values():
            issued.clear()
        self._times = {}
        self._origin = dict.fromkeys(CUDA_LANES, (self._base, 0.0))
        self._base.record(self.streams[Lane.COMPUTE])
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def bind(self, lane: Lane) -> None:
        """Make the lane's stream the calling thread's current one."""
        torch.cuda.set_device(self._device)
        if lane in CUDA_LANES:
            torch.cuda.set_stream(self.streams[lane])

    def release(self) -> None:
        """Back to the default stream."""
        torch.cuda.set_stream(torch.cuda.default_stream(self._device))

    def wait(self, lane: Lane, index: int) -> None:
        """A stream waits for the event; the thread of a host lane waits itself."""
        event = self._ends[index]
        if event is None:
            raise AssertionError(f"clock: op {index} has no event")
        if lane in CUDA_LANES:
            self.streams[lane].wait_event(event)
        else:
            event.synchronize()

    def start(self, lane: Lane, index: int) -> None:
        """Record the start event, or the host's time; first wait if too much is under way."""
        event = self._starts[index]
        if event is None:
            self._host_s[index][0] = time.perf_counter()
            return
        issued = self._issued[lane]
        if len(issued) == _AHEAD:
            oldest = self._ends[issued.popleft()]
            if oldest is not None:
                oldest.synchronize()
        issued.append(index)
        event.record(self.streams[lane])

    def end(self, lane: Lane, index: int) -> None:
        """Record the end event, or the host's time."""
        event = self._ends[index]
        if event is None:
            self._host_s[index][1] = time.perf_counter()
        else:
            event.record(self.streams[lane])

    def drain(self) -> None:
        """A device-wide synchronisation."""
        torch.cuda.synchronize(self._device)

    def is_async(self, lane: Lane) -> bool:
        """CUDA lanes are."""
        return lane in CUDA_LANES

    def await_end(self, index: int) -> None:
        """Wait for the end event; an op of a host lane has ended."""
        event = self._ends[index]
        if event is not None:
            event.synchronize()

    def has_ended(self, index: int) -> bool:
        """Ask the end event; an op of a host lane has ended."""
        event = self._ends[index]
        return event is None or event.query()

    def now_s(self) -> float:
        """Host time in seconds since ``begin``."""
        return time.perf_counter() - self._base_s

    def time(self, index: int) -> tuple[float, float]:
        """Start and end of an op that has ended in seconds since ``begin``; asked in lane order."""
        start, end = self._starts[index], self._ends[index]
        if start is None or end is None:
            first_s, last_s = self._host_s[index]
            return first_s - self._base_s, last_s - self._base_s
        known = self._times.get(index)
        if known is None:
            lane = self._lane[index]
            event, at_s = self._origin[lane]
            start_s = at_s + 1e-3 * event.elapsed_time(start)
            end_s = start_s + 1e-3 * start.elapsed_time(end)
            if start_s - at_s > _HOP_S:
                self._origin[lane] = (start, start_s)
            known = self._times[index] = (start_s, end_s)
        return known

    def times(self) -> list[tuple[float, float]]:
        """Start and end of every op in seconds since ``begin``."""
        torch.cuda.synchronize(self._device)
        return [self.time(index) for index in range(len(self._lane))]


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """A timing event that exists already: torch makes one when it is first recorded."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
