"""Programs: a block of requests as arrays, its steps as templates with amounts filled in.

The policy decides step after step as ever (``policies.drive.drive``); only its ops are not emitted
one by one. What readers get wrong: the costs charged are those of the cost model that the SimPy
executor asks. An amount is priced once for all steps in which its numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from policies.cost.protocol import Costs
from policies.drive import Policy
from policies.placement import Placement
from policies.plan.op import LANE_OF, Kind, Lane, Op
from policies.spec.model import ModelSpec
from sim.arrays import N_LANES, Floats, Ints, Longs, Program
from sim.assembly import plain_template
from sim.collector import collector_paused
from sim.cut import Cutter
from sim.library import Library
from sim.maker import TemplateMaker
from sim.prices import Prices
from sim.template import Families, Template
from sim.tracing import AMOUNTS, Step, variables

_LANES = list(Lane)


@dataclass(frozen=True, slots=True, eq=False)
class BlockProgram:
    """A block and what follows from its amounts alone.

    ``lane_s`` are the uncontended seconds of each lane, ``nbytes`` the bytes per lane and kind.
    """

    arrays: Program
    n_ops: int
    n_steps: int
    lane_s: Floats  # (N_LANES,)
    nbytes: dict[tuple[Lane, Kind], int]
    _block: int
    _templates: list[Template]
    _rows: list[Floats]  # variables of each template's steps

    def n_ops_before(self, step: int) -> int:
        """Ops that are emitted before ``step`` begins; all of the block if it has no such step."""
        arrays = self.arrays
        return int(arrays.lane_ops[arrays.step_number < step].sum())

    def ops(self) -> Iterator[Op]:
        """The ops in program order, without their slots; what ``policy.step`` would have emitted.

        One by one and slow: for spans and for the proof that array and op-by-op form agree.
        """
        numbers = self.arrays.step_number.tolist()
        for at, (t, row, order) in zip(numbers, self._orders(), strict=True):
            template = self._templates[t]
            amounts = template.numbers.at(row).reshape(-1, len(AMOUNTS)).tolist()
            ahead, layer, batch = (
                getattr(template, name).tolist() for name in ("ahead", "layer", "batch")
            )
            for op, amount in order:
                changed: dict[str, Any] = dict(zip(AMOUNTS, amounts[amount], strict=True))
                changed["block"], changed["step"] = self._block, at + ahead[op]
                changed["layer"], changed["batch"] = layer[op], batch[op]
                yield replace(template.amounts[amount].sample, **changed)

    def seconds(self) -> Iterator[float]:
        """Uncontended seconds of the ops in program order."""
        for start, (_, _, order) in zip(
            self.arrays.step_amounts.tolist(), self._orders(), strict=True
        ):
            for _, amount in order:
                yield float(self.arrays.seconds[start + amount])

    def _orders(self) -> Iterator[tuple[int, Floats, Iterator[tuple[int, int]]]]:
        """Template, variables and order of ops of each step."""
        seen = [0] * len(self._templates)
        bounds = zip(self.arrays.loop_first.tolist(), self.arrays.loop_times.tolist(), strict=True)
        for t, (first, times) in zip(self.arrays.step_template.tolist(), bounds, strict=True):
            yield t, self._rows[t][seen[t]], self._templates[t].order(first, times)
            seen[t] += 1


class Programs:
    """Makes the programs of a run's blocks; templates and prices are shared between them.

    ``costs`` must price by amounts, as ``policies.cost.model.CostModel`` does: ops that differ in
    step, batch, or in the layer within its class cost the same, and so do moves of as many tokens.
    """

    def __init__(
        self, policy: Policy, model: ModelSpec, placement: Placement, costs: Costs
    ) -> None:
        self._placement = placement
        self._prices = Prices(costs)
        self._families = Families(model.n_layers)
        maker = TemplateMaker(policy, Cutter(model, placement), self._families)
        self._library = Library(maker)

    @property
    def n_templates(self) -> int:
        """Templates made so far and kept."""
        return self._library.n_templates

    def with_costs(self, costs: Costs) -> Programs:
        """Programs with the same templates, priced by ``costs`` of the same placement."""
        other = copy(self)
        other._prices = Prices(costs)
        return other

    def of_block(self, steps: Sequence[Step], fence: Op) -> BlockProgram:
        """The program of a block from all its steps and the fence behind them.

        ``sim.tracing.UntraceableError`` if the policy cannot be traced, ``ValueError`` for a cost
        that is not a time.
        """
        with collector_paused():
            self._library.forget()
            self._prices.forget()
            x = variables(steps)
            templates, of_step = self._library.assign(steps, x)
            ending = plain_template([fence], self._families)
            templates.append(ending)
            of_step = np.append(of_step, len(templates) - 1)
            x = np.concatenate((x, x[-1:]))
            numbers = [step.step for step, _, _ in steps] + [fence.step]
            return self._fill(templates, of_step, x, numbers, fence.block)

    # ---- amounts ------------------------------------------------------------------------------

    def _fill(
        self, templates: list[Template], of_step: Longs, x: Floats, numbers: list[int], block: int
    ) -> BlockProgram:
        """Evaluate and price the amounts of every step, template by template."""
        home, n_steps = self._placement.kv[block], len(of_step)
        n_loops = max(len(template.loops) for template in templates)
        arrays = Steps(
            of_step.astype(np.int32),
            np.array(numbers, np.int32),
            np.zeros(n_steps, np.int64),
            np.zeros((n_steps, N_LANES), np.int64),
            np.zeros((n_steps, n_loops), np.int32),
            np.zeros((n_steps, n_loops), np.int32),
        )
        rows: list[Floats] = []
        seconds: list[Floats] = []
        lane_s, nbytes = np.zeros(N_LANES), dict[tuple[Lane, Kind], int]()
        at = 0
        for t, template in enumerate(templates):
            members = np.flatnonzero(of_step == t)
            spent, moved = self._prices.table(template, x[members], home, block)
            first, times = template.loops_over(x[members])
            uses = template.uses(first, times)
            for amount, amount_s, amount_bytes in zip(
                template.amounts,
                (spent * uses).sum(axis=0).tolist(),
                (moved * uses).sum(axis=0).tolist(),
                strict=True,
            ):
                kind = amount.sample.kind
                lane = LANE_OF[kind]
                lane_s[_LANES.index(lane)] += amount_s
                nbytes[lane, kind] = nbytes.get((lane, kind), 0) + amount_bytes
            arrays.amounts[members] = at + np.arange(len(members)) * spent.shape[1]
            arrays.lane_ops[members] = template.lane_ops(times)
            arrays.loop_first[members, : len(template.loops)] = first
            arrays.loop_times[members, : len(template.loops)] = times
            at += spent.size
            seconds.append(spent.ravel())
            rows.append(x[members])
        program = joined(templates, arrays, np.concatenate(seconds), self._families.n_slots)
        n_ops = int(arrays.lane_ops.sum())
        return BlockProgram(
            program, n_ops, max(numbers) + 1, lane_s, nbytes, block, templates, rows
        )


class Steps(NamedTuple):
    """What a program knows of its steps, as ``sim.arrays.Program`` has it."""

    template: Ints
    number: Ints
    amounts: Longs
    lane_ops: Longs
    loop_first: Ints
    loop_times: Ints


def joined(templates: Sequence[Template], steps: Steps, seconds: Floats, n_slots: int) -> Program:
    """Templates one after another; offsets into their slots move along."""

    def column(name: str) -> Ints:
        return np.concatenate([getattr(template, name) for template in templates])

    def offsets(first: str) -> Longs:
        ends = [getattr(template, first) for template in templates]
        before = np.cumsum([0, *(int(end[-1]) for end in ends)])
        pieces = [end[:-1] + b for end, b in zip(ends, before[:-1], strict=True)]
        return np.append(np.concatenate(pieces), before[-1])

    return Program(
        step_template=steps.template,
        step_number=steps.number,
        step_amounts=steps.amounts,
        lane_ops=steps.lane_ops,
        loop_first=steps.loop_first,
        loop_times=steps.loop_times,
        seconds=seconds,
        first_op=np.cumsum([0, *(len(t.lane) for t in templates)]),
        led=np.array([t.led for t in templates]),
        lane=column("lane").astype(np.uint8, copy=False),
        category=column("category").astype(np.uint8, copy=False),
        flags=column("flags").astype(np.uint8, copy=False),
        ahead=column("ahead").astype(np.int8, copy=False),
        amount=column("amount"),
        loop=column("loop"),
        turn=column("turn").astype(np.uint8, copy=False),
        first_read=offsets("first_read"),
        read=column("read"),
        first_write=offsets("first_write"),
        write=column("write"),
        n_slots=max(1, n_slots),
    )


def plain_program(ops: Sequence[Op], seconds: Floats) -> Program:
    """Any plan as one step."""
    families = Families(n_layers=0)
    template = plain_template(ops, families)
    at_once, no_loops = np.zeros(1, np.int32), np.zeros((1, 0), np.int32)
    steps = Steps(
        at_once, at_once, np.zeros(1, np.int64), template.plain_ops[None], no_loops, no_loops
    )
    return joined([template], steps, seconds, families.n_slots)
