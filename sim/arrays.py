"""The arrays that the compiled executor reads and writes.

A ``Program`` is what runs, an ``Outcome`` what comes out, a ``State`` what a run keeps meanwhile.
What readers get wrong: ops are numbered per lane, from 1, so that 0 can mean none, and an op lives
in the state only while somebody may still wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

N_LANES = 5  # in the order of policies.plan.op.Lane
N_CATEGORIES = 8  # in the order of policies.trace.attribution.Category
FORWARD, PREFILL, FENCE = 1, 2, 4  # flags of an op
DONE, TOO_NARROW, STALLED = 0, 1, 2  # how a run ends

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Program(NamedTuple):
    """A block as arrays. Templates lie one after another; T of them, n ops, S steps.

    Step i runs template ``step_template[i]`` with the amounts from ``seconds[step_amounts[i]]`` on;
    its ops work for step ``step_number[i] + ahead[op]``. Op o reads slots ``read[first_read[o]:
    first_read[o + 1]]`` and writes likewise. Slots are integers in ``0..n_slots - 1``.

    Where ``turn[o]`` is n > 0, ops o to o + n - 1 are one turn of loop ``loop[o]``. Step i takes
    ``loop_times[i, loop[o]]`` turns and counts from ``loop_first[i, loop[o]]``; an op has the
    amount that lies as far behind its own as was counted.

    Where ``led[t, L]``, the first op that lane L has in a step of template t waits for an op of
    another lane in the same step, whatever turns loops take.
    """

    step_template: Ints  # (S,)
    step_number: Ints  # (S,)
    step_amounts: Longs  # (S,)
    lane_ops: Longs  # (S, N_LANES), ops of each lane
    loop_first: Ints  # (S, loops)
    loop_times: Ints  # (S, loops)
    seconds: Floats
    first_op: Longs  # (T + 1,)
    led: Bytes  # (T, N_LANES)
    lane: Bytes  # (n,)
    category: Bytes  # (n,)
    flags: Bytes  # (n,)
    ahead: NDArray[np.int8]  # (n,)
    amount: Ints  # (n,)
    loop: Ints  # (n,)
    turn: Bytes  # (n,)
    first_read: Longs  # (n + 1,)
    read: Ints
    first_write: Longs  # (n + 1,)
    write: Ints
    n_slots: int


class Outcome(NamedTuple):
    """What a run accumulates. ``start_s``, ``end_s`` and ``waits_for`` cover the first ops only.

    ``waits_for[i, L]`` is the op of lane L, numbered in that lane from 1, that op i waits for.
    """

    times_s: Floats  # (2,): end of the block, end of its prefill
    busy_s: Floats  # (N_LANES,)
    charged_s: Floats  # (N_CATEGORIES,), along the critical path
    step_end_s: Floats  # (steps,), end of the last FORWARD of each step
    start_s: Floats  # (n_recorded,)
    end_s: Floats  # (n_recorded,)
    waits_for: Ints  # (n_recorded, N_LANES)


class Window(NamedTuple):
    """The ops in flight, op n of a lane at ``n & (width - 1)``; width is a power of two."""

    seconds: Floats  # (N_LANES, width)
    end_s: Floats  # (N_LANES, width)
    charged_s: Floats  # (N_LANES, width, N_CATEGORIES)
    need: Ints  # (N_LANES, width, N_LANES)
    kind: Bytes  # (N_LANES, width), category and flags
    step: Ints  # (N_LANES, width)
    position: Longs  # (N_LANES, width), in the plan


class Links(NamedTuple):
    """Last writer of each slot, its last reader of each lane since (0: none), and the steps."""

    writer_lane: Bytes  # (n_slots,)
    writer: Ints  # (n_slots,)
    reader: Ints  # (n_slots, N_LANES)
    fence: Longs  # (1,), the last one
    floor: Longs  # (N_LANES,), ops up to this one lie before the last fence
    done_then: Longs  # (S, N_LANES), ops ended when a step was linked
    linked_then: Longs  # (S, N_LANES), ops linked after it was
    oldest: Longs  # (1,), step that may have ops in flight


class Lanes(NamedTuple):
    """State of each lane. The last three matter on the shared link only."""

    linked: Longs  # number of ops linked
    done: Longs  # number of ops ended
    upcoming: Longs  # step with the lane's next ops that are not linked yet
    blocked_on: Longs  # a lane that the head waits for, -1: none known
    running: Bytes
    start_s: Floats
    finish_s: Floats  # infinite while idle
    left_s: Floats
    since_s: Floats
    rate: Floats


class State(NamedTuple):
    """Everything that a run keeps."""

    window: Window
    links: Links
    lanes: Lanes


def new_state(program: Program, width: int) -> State:
    """State of a run whose window holds ``width`` ops of a lane, a power of two."""
    wide, lanes, n_slots = (N_LANES, width), N_LANES, program.n_slots
    n_steps = len(program.step_template)
    window = Window(
        np.empty(wide),
        np.zeros(wide),
        np.zeros((*wide, N_CATEGORIES)),
        np.zeros((*wide, lanes), np.int32),
        np.zeros(wide, np.uint8),
        np.zeros(wide, np.int32),
        np.zeros(wide, np.int64),
    )
    links = Links(
        np.zeros(n_slots, np.uint8),
        np.zeros(n_slots, np.int32),
        np.zeros((n_slots, lanes), np.int32),
        np.zeros(1, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros((n_steps, lanes), np.int64),
        np.zeros((n_steps, lanes), np.int64),
        np.zeros(1, np.int64),
    )
    return State(
        window,
        links,
        Lanes(
            np.zeros(lanes, np.int64),
            np.zeros(lanes, np.int64),
            np.zeros(lanes, np.int64),
            np.full(lanes, -1, np.int64),
            np.zeros(lanes, np.uint8),
            np.zeros(lanes),
            np.full(lanes, np.inf),
            np.zeros(lanes),
            np.zeros(lanes),
            np.ones(lanes),
        ),
    )
