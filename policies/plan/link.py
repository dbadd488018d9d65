"""The linker: derives what each op waits for from the slots that it reads and writes.

A read waits for the last writer of the slot; a write waits for the last writer and for every reader
since. A FENCE waits for everything before it and holds everything after. Because a lane runs its
ops in program order, waiting for one op of a lane is waiting for all of that lane before it: an op
keeps at most one dependency per foreign lane, the latest, and none on its own lane. That is what
CUDA streams with events do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from policies.plan.op import LANE_OF, Kind, Lane, Op, Slot

_LANE_INDEX = {lane: i for i, lane in enumerate(Lane)}
_INDEX_OF = {kind: _LANE_INDEX[lane] for kind, lane in LANE_OF.items()}
_N_LANES = len(Lane)


class LinkedOp(NamedTuple):
    """An op at position ``index`` of the plan and the positions that must end before it starts."""

    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    op: Op
    deps: tuple[int, ...]


class Linker:
    """Links a stream of ops; its state persists, so steps can be linked one after another."""

    def __init__(self) -> None:
        self._n = 0
        self._last = [-1] * _N_LANES  # last op of each lane
        self._fence = -1
        self._writer: dict[Slot, tuple[int, int]] = {}  # slot -> (lane index, op index)
        self._readers: dict[Slot, list[int]] = {}  # slot -> last reader per lane since the write

    def link(self, op: Op) -> LinkedOp:
        """Position and dependencies of the next op."""
        index, self._n = self._n, self._n + 1
        lane = _INDEX_OF[op.kind]
        if op.kind is Kind.FENCE:
            deps = [last for i, last in enumerate(self._last) if i != lane]
            self._fence = index
            # Everything later waits for the fence, so what happened before it no longer matters.
            self._writer.clear()
            self._readers.clear()
        else:
            deps = [-1] * _N_LANES
            deps[_LANE_INDEX[Lane.COMPUTE]] = self._fence
            for slot in op.reads:
                writer = self._writer.get(slot)
                if writer is not None and writer[1] > deps[writer[0]]:
                    deps[writer[0]] = writer[1]
                readers = self._readers.get(slot)
                if readers is None:
                    readers = self._readers[slot] = [-1] * _N_LANES
                readers[lane] = index
            for slot in op.writes:
                writer = self._writer.get(slot)
                if writer is not None and writer[1] > deps[writer[0]]:
                    deps[writer[0]] = writer[1]
                for i, reader in enumerate(self._readers.pop(slot, ())):
                    if reader != index and reader > deps[i]:
                        deps[i] = reader
                self._writer[slot] = (lane, index)
            deps[lane] = -1
        self._last[lane] = index
        return LinkedOp(index, op, tuple(d for d in deps if d >= 0))


def link(ops: Iterable[Op]) -> Iterator[LinkedOp]:
    """Link a whole plan lazily."""
    linker = Linker()
    for op in ops:
        yield linker.link(op)
