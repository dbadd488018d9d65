"""The compiled event loop: links and executes a block of requests from arrays.

It means what ``policies.plan.link`` and ``sim.engine`` mean together, and a test holds it to that.
Ops are numbered per lane, from 1: lanes serve in order, so "op n of lane L has ended" is ``done[L]
>= n`` and a dependency is one number a lane. What readers get wrong: steps are linked while the
block runs, so that no more than a few steps are in memory, but this is not an approximation. A lane
that runs empty gets its next ops before the clock moves, unless they wait for others that are not
linked either, hence nothing is ever linked too late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from sim.arrays import (
    DONE,
    FENCE,
    FORWARD,
    N_CATEGORIES,
    N_LANES,
    PREFILL,
    STALLED,
    TOO_NARROW,
    Bytes,
    Ints,
    Lanes,
    Longs,
    Outcome,
    Program,
    State,
    Window,
)

_COMPUTE, _H2D, _D2H = 0, 1, 2

Function = Callable[..., Any]

# Nothing here allocates, so nothing needs a reference count, and counting would take nine tenths of
# the time: every access to an array in a tuple counts. No public option says so.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def _compile(function: Function) -> Function:
    """Compile at the first call, or load what was compiled.

    The cache on disk is renewed when this file changes, not when ``sim.arrays`` does.
    """
    compiled: Function
    try:
        compiled = njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder that can be written to
        compiled = njit(**_OPTIONS)(function)
    return compiled


@_compile
def _wait_for_slots(
    program: Program, state: State, op: int, lane: int, number: int, at: int
) -> None:
    """Write into the window what op ``number`` of a lane waits for, and book its slots."""
    links, need = state.links, state.window.need
    for i in range(program.first_read[op], program.first_read[op + 1]):
        slot = program.read[i]
        other, writer = links.writer_lane[slot], links.writer[slot]
        if writer > need[lane, at, other] and writer > links.floor[other]:
            need[lane, at, other] = writer
        links.reader[slot, lane] = number
    for i in range(program.first_write[op], program.first_write[op + 1]):
        slot = program.write[i]
        other, writer = links.writer_lane[slot], links.writer[slot]
        if writer > need[lane, at, other] and writer > links.floor[other]:
            need[lane, at, other] = writer
        for reading in range(N_LANES):
            reader = links.reader[slot, reading]
            if reader > need[lane, at, reading] and reader > links.floor[reading]:
                need[lane, at, reading] = reader
            links.reader[slot, reading] = 0
        links.writer_lane[slot] = lane
        links.writer[slot] = number


@_compile
def _link_op(
    program: Program, state: State, outcome: Outcome, step: int, op: int, amount: int, index: int
) -> None:
    """Queue one op of a step, the plan's op ``index``."""
    window, links, lanes = state.window, state.links, state.lanes
    lane, flags = program.lane[op], program.flags[op]
    lanes.linked[lane] += 1
    number = lanes.linked[lane]
    at = number & (window.seconds.shape[1] - 1)
    for other in range(N_LANES):
        window.need[lane, at, other] = 0
    if flags & FENCE:
        for other in range(N_LANES):
            window.need[lane, at, other] = lanes.linked[other]
            links.floor[other] = lanes.linked[other]
        links.fence[0] = number
    else:
        window.need[lane, at, _COMPUTE] = links.fence[0]
        _wait_for_slots(program, state, op, lane, number, at)
    window.need[lane, at, lane] = 0
    for other in range(N_LANES):
        if index < outcome.start_s.shape[0]:
            outcome.waits_for[index, other] = window.need[lane, at, other]
        # Ended ops are neither waited for nor binding: the lane's previous op ends no earlier.
        if window.need[lane, at, other] <= lanes.done[other]:
            window.need[lane, at, other] = 0
    window.seconds[lane, at] = program.seconds[amount]
    window.kind[lane, at] = program.category[op] | flags << 4
    window.step[lane, at] = program.step_number[step] + program.ahead[op]
    window.position[lane, at] = index


@_compile
def _link_step(program: Program, state: State, outcome: Outcome, step: int, index: int) -> int:
    """Queue the ops of one step, ``index`` of them before it; the number with them."""
    links, lanes = state.links, state.lanes
    template, amounts = program.step_template[step], program.step_amounts[step]
    op, last = program.first_op[template], program.first_op[template + 1]
    while op < last:
        length, times, count = 1, 1, 0
        if program.turn[op]:
            length = program.turn[op]
            times = program.loop_times[step, program.loop[op]]
            count = program.loop_first[step, program.loop[op]]
        for turn in range(count, count + times):
            for at in range(op, op + length):
                amount = amounts + program.amount[at] + turn
                _link_op(program, state, outcome, step, at, amount, index)
                index += 1
        op += length
    for lane in range(N_LANES):
        links.linked_then[step, lane] = lanes.linked[lane]
    return int(index)


@_compile
def _slow_down(lanes: Lanes, lane: int, rate: float, now_s: float) -> None:
    """Bring the copy on ``lane`` up to date and let it go on at ``rate``."""
    left_s = lanes.left_s[lane] - (now_s - lanes.since_s[lane]) * lanes.rate[lane]
    lanes.left_s[lane] = max(0.0, left_s)
    lanes.since_s[lane] = now_s
    lanes.rate[lane] = rate
    lanes.finish_s[lane] = now_s + lanes.left_s[lane] / rate


@_compile
def _start_head(window: Window, lanes: Lanes, lane: int, now_s: float, duplex: float) -> None:
    """Start the first op of an idle lane if all that it waits for has ended."""
    number = lanes.done[lane] + 1
    if number > lanes.linked[lane]:
        return
    mask = window.seconds.shape[1] - 1
    at = number & mask
    binding_lane, binding_at, latest_s = lane, (number - 1) & mask, -1.0
    if number > 1:
        latest_s = window.end_s[lane, binding_at]
    for other in range(N_LANES):
        dep = window.need[lane, at, other]
        if dep:
            if dep > lanes.done[other]:
                lanes.blocked_on[lane] = other
                return
            if window.end_s[other, dep & mask] > latest_s:
                binding_lane, binding_at = other, dep & mask
                latest_s = window.end_s[other, binding_at]
    lanes.blocked_on[lane] = -1
    for category in range(N_CATEGORIES):
        window.charged_s[lane, at, category] = (
            window.charged_s[binding_lane, binding_at, category] if latest_s >= 0.0 else 0.0
        )
    lanes.running[lane] = 1
    lanes.start_s[lane] = now_s
    seconds = window.seconds[lane, at]
    if duplex < 1.0 and lane in (_H2D, _D2H):
        opposite = _H2D + _D2H - lane
        rate = duplex if lanes.running[opposite] else 1.0
        if lanes.running[opposite]:
            _slow_down(lanes, opposite, duplex, now_s)
        lanes.left_s[lane], lanes.since_s[lane], lanes.rate[lane] = seconds, now_s, rate
        lanes.finish_s[lane] = now_s + seconds / rate
    else:
        lanes.finish_s[lane] = now_s + seconds


@_compile
def _end_head(
    window: Window, lanes: Lanes, outcome: Outcome, lane: int, now_s: float, duplex: float
) -> int:
    """End the op that runs on ``lane``; its position in the plan."""
    number = lanes.done[lane] + 1
    at = number & (window.seconds.shape[1] - 1)
    start_s, kind, index = lanes.start_s[lane], window.kind[lane, at], window.position[lane, at]
    window.end_s[lane, at] = now_s
    window.charged_s[lane, at, kind & 15] += now_s - start_s
    outcome.busy_s[lane] += now_s - start_s
    if kind >> 4 & PREFILL and window.step[lane, at] == 0:
        outcome.times_s[1] = now_s
    if kind >> 4 & FORWARD:
        outcome.step_end_s[window.step[lane, at]] = now_s
    if index < outcome.start_s.shape[0]:
        outcome.start_s[index], outcome.end_s[index] = start_s, now_s
    lanes.done[lane] = number
    lanes.running[lane] = 0
    lanes.finish_s[lane] = np.inf
    if duplex < 1.0 and lane in (_H2D, _D2H):
        opposite = _H2D + _D2H - lane
        if lanes.running[opposite]:
            _slow_down(lanes, opposite, 1.0, now_s)
    return int(index)


@_compile
def _starving(program: Program, lanes: Lanes, n_linked: int) -> bool:
    """Whether a lane is empty whose next op, of a step that is not linked yet, could start.

    It cannot if it waits for an op of its own step, for that is not linked either.
    """
    n_steps = program.step_template.shape[0]
    for lane in range(N_LANES):
        if lanes.done[lane] == lanes.linked[lane]:
            step = max(lanes.upcoming[lane], n_linked)
            while step < n_steps and program.lane_ops[step, lane] == 0:
                step += 1
            lanes.upcoming[lane] = step
            if step < n_steps and not program.led[program.step_template[step], lane]:
                return True
    return False


@_compile
def _has_room(program: Program, state: State, step: int, width: int) -> bool:
    """Whether the ops of a step can be queued without losing one that is still needed.

    An op in flight needs what had not ended when its step was linked.
    """
    lanes, links = state.lanes, state.links
    oldest = links.oldest[0]
    while oldest < step:
        for lane in range(N_LANES):
            if lanes.done[lane] < links.linked_then[oldest, lane]:
                break
        else:
            oldest += 1
            continue
        break
    links.oldest[0] = oldest
    for lane in range(N_LANES):
        links.done_then[step, lane] = lanes.done[lane]
    for lane in range(N_LANES):
        last = lanes.linked[lane] + program.lane_ops[step, lane]
        if last - width >= links.done_then[oldest, lane]:
            return False
    return True


@_compile
def run_block(program: Program, state: State, outcome: Outcome, duplex: float) -> int:
    """Run a block from time 0.

    ``TOO_NARROW`` asks for a wider window and a new start, ``STALLED`` means that ops are left and
    none can start. ``state`` must be new, ``outcome`` all zeros.
    """
    window, lanes = state.window, state.lanes
    n_steps, width = program.step_template.shape[0], window.seconds.shape[1]
    n_linked, n_ops, n_ended, last_index = 0, 0, 0, -1
    now_s, lane = 0.0, -1
    while True:
        fresh = False
        while n_linked < n_steps and _starving(program, lanes, n_linked):
            if not _has_room(program, state, n_linked, width):
                return TOO_NARROW
            n_ops = _link_step(program, state, outcome, n_linked, n_ops)
            n_linked += 1
            fresh = True
        for other in range(N_LANES):
            if not lanes.running[other] and (
                fresh or other == lane or lanes.blocked_on[other] == lane
            ):
                _start_head(window, lanes, other, now_s, duplex)
        lane = 0
        for other in range(1, N_LANES):
            if lanes.finish_s[other] < lanes.finish_s[lane]:
                lane = other
        if not lanes.running[lane]:
            break
        now_s = lanes.finish_s[lane]
        index = _end_head(window, lanes, outcome, lane, now_s, duplex)
        n_ended += 1
        if now_s > outcome.times_s[0] or index < last_index or last_index < 0:
            # Of the ops that end last, the first of the plan ends the critical path.
            outcome.times_s[0], last_index = now_s, index
            at = lanes.done[lane] & (width - 1)
            for category in range(N_CATEGORIES):
                outcome.charged_s[category] = window.charged_s[lane, at, category]
    return DONE if n_ended == n_ops and n_linked == n_steps else STALLED


@_compile
def find_led(
    led: Bytes, lane: Bytes, flags: Bytes, turn: Bytes, first_read: Longs, read: Ints,
    first_write: Longs, write: Ints, touched: Bytes,
) -> None:  # fmt: skip
    """Fill ``led`` of a template, (N_LANES,), see ``sim.arrays.Program``; all zeros before.

    ``turn[o]`` says whether op o is in a loop, ``touched``, (n_slots, 2), is scratch, all zeros:
    by which lanes, as bits, each slot was read and written by ops that are in none.
    """
    fenced, found, alone = 0, 0, 0  # lanes as bits
    for op in range(lane.shape[0]):
        own = 1 << lane[op]
        others = fenced
        for i in range(first_read[op], first_read[op + 1]):
            others |= touched[read[i], 1]
        for i in range(first_write[op], first_write[op + 1]):
            others |= touched[write[i], 0] | touched[write[i], 1]
        if not found & own:
            if not others & ~own:
                alone |= own
            if not turn[op]:
                found |= own
        if turn[op]:
            continue
        if flags[op] & FENCE:
            fenced = own
        for i in range(first_read[op], first_read[op + 1]):
            touched[read[i], 0] |= own
        for i in range(first_write[op], first_write[op + 1]):
            touched[write[i], 1] |= own
    for other in range(N_LANES):
        led[other] = not alone & 1 << other
