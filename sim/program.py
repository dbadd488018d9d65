"""Programs: a block of requests as arrays, its steps as templates with amounts filled in.

The policy decides step after step as ever (``policies.drive.drive``); only its ops are not emitted
one by one. What readers get wrong: the costs charged are those of the cost model that the SimPy
executor asks. An amount is priced once for all steps in which its numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from policies.cost.protocol import Costs
from policies.drive import Policy
from policies.placement import Placement
from policies.plan.op import LANE_OF, Kind, Lane, Op
from policies.spec.model import ModelSpec
from sim.arrays import N_LANES, Floats, Ints, Longs, Program
from sim.cut import Cutter
from sim.forms import Guards
from sim.template import Families, Template, TemplateMaker, plain_template
from sim.tracing import AMOUNTS, Step, variables

_MAX_TEMPLATES = 2048  # kept for later blocks; about 0.1 MB each
_MAX_PRICES = 200_000  # kept for later blocks; about 0.5 kB each

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
        before = arrays.step_template[arrays.step_number < step]
        return int(arrays.lane_ops.sum(axis=1)[before].sum())

    def ops(self) -> Iterator[Op]:
        """The ops in program order, without their slots; what ``policy.step`` would have emitted.

        One by one and slow: for spans and for the proof that array and op-by-op form agree.
        """
        of_step, numbers = self.arrays.step_template.tolist(), self.arrays.step_number.tolist()
        seen = [0] * len(self._templates)
        for t, number in zip(of_step, numbers, strict=True):
            template = self._templates[t]
            rows, _, _ = template.numbers_over(self._rows[t][seen[t] : seen[t] + 1])
            seen[t] += 1
            where = zip(
                template.amount.tolist(), template.ahead.tolist(), template.layer.tolist(),
                template.batch.tolist(), strict=True,
            )  # fmt: skip
            for amount, ahead, layer, batch in where:
                yield replace(
                    template.amounts[amount].sample,
                    block=self._block,
                    step=number + ahead,
                    layer=layer,
                    batch=batch,
                    **dict(zip(AMOUNTS, rows[amount], strict=True)),
                )


class Programs:
    """Makes the programs of a run's blocks; templates and prices are shared between them.

    ``costs`` must price by amounts, as ``policies.cost.model.CostModel`` does: ops that differ in
    step, batch, or in the layer within its class cost the same.
    """

    def __init__(
        self, policy: Policy, model: ModelSpec, placement: Placement, costs: Costs
    ) -> None:
        self._costs, self._placement = costs, placement
        self._families = Families(model.n_layers)
        self._maker = TemplateMaker(policy, Cutter(model, placement), self._families)
        self._templates: dict[tuple[object, ...], list[Template]] = {}
        self.n_templates = 0  # made so far and kept
        self._prices: dict[tuple[object, ...], dict[tuple[int, ...], tuple[float, int]]] = {}
        self._n_prices = 0

    def with_costs(self, costs: Costs) -> Programs:
        """Programs with the same templates, priced by ``costs`` of the same placement."""
        other = copy(self)
        other._costs, other._prices, other._n_prices = costs, {}, 0
        return other

    def of_block(self, steps: Sequence[Step], fence: Op) -> BlockProgram:
        """The program of a block from all its steps and the fence behind them.

        ``sim.tracing.UntraceableError`` if the policy cannot be traced, ``ValueError`` for a cost
        that is not a time.
        """
        self._forget()
        x = variables(steps)
        templates, of_step = self._assign(steps, x)
        ending = plain_template([fence], self._families, x.shape[1])
        templates.append(ending)
        of_step = np.append(of_step, len(templates) - 1)
        x = np.concatenate((x, x[-1:]))
        numbers = [step.step for step, _, _ in steps] + [fence.step]
        return self._fill(templates, of_step, x, numbers, fence.block)

    # ---- templates ----------------------------------------------------------------------------

    def _assign(self, steps: Sequence[Step], x: Floats) -> tuple[list[Template], Longs]:
        """The templates in use and, for each step, which of them is its own."""
        groups: dict[tuple[object, ...], list[int]] = {}
        n_batches = steps[0][0].n_batches
        for i, (_, now, then) in enumerate(steps):
            # An index, not a condition: the guards decide whether a template holds.
            groups.setdefault((n_batches, now.slices, then is None), []).append(i)
        used: list[Template] = []
        of_step = np.zeros(len(steps), np.int64)
        for key, members in groups.items():
            left = np.array(members)
            known = self._templates.setdefault(key, [])
            for template in known:
                left = _take(left, template.guards, x, of_step, used, template)
                if not left.size:
                    break
            while left.size:
                template = self._maker.make(steps[left[0]], x.shape[1])
                known.append(template)
                self.n_templates += 1
                first, left = left[0], _take(left, template.guards, x, of_step, used, template)
                if first in left:
                    raise AssertionError("template: does not hold for the step it is made from")
        return used, of_step

    # ---- amounts ------------------------------------------------------------------------------

    def _fill(
        self, templates: list[Template], of_step: Longs, x: Floats, numbers: list[int], block: int
    ) -> BlockProgram:
        """Evaluate and price the amounts of every step, template by template."""
        starts = np.zeros(len(of_step), np.int64)
        rows: list[Floats] = []
        seconds: list[Floats] = []
        lane_s, nbytes = np.zeros(N_LANES), dict[tuple[Lane, Kind], int]()
        at = 0
        for t, template in enumerate(templates):
            members = np.flatnonzero(of_step == t)
            table, moved = self._price(template, x[members], block)
            uses = np.array([amount.uses for amount in template.amounts])
            for amount, spent_s, n in zip(
                template.amounts, (table.sum(axis=0) * uses).tolist(), moved, strict=True
            ):
                kind = amount.sample.kind
                lane = LANE_OF[kind]
                lane_s[_LANES.index(lane)] += spent_s
                nbytes[lane, kind] = nbytes.get((lane, kind), 0) + n * amount.uses
            starts[members] = at + np.arange(len(members)) * table.shape[1]
            at += table.size
            seconds.append(table.ravel())
            rows.append(x[members])
        arrays = assemble(
            templates, of_step, numbers, starts, np.concatenate(seconds), self._families.n_slots
        )
        n_ops = int(arrays.lane_ops.sum(axis=1)[of_step].sum())
        return BlockProgram(arrays, n_ops, max(numbers) + 1, lane_s, nbytes, block, templates, rows)

    def _price(self, template: Template, x: Floats, block: int) -> tuple[Floats, list[int]]:
        """Seconds of each amount in each step, (n_steps, n_amounts), and its bytes in all steps.

        Prices are looked up by the numbers that vary over the steps, the others choose the table.
        """
        home = self._placement.kv[block]
        first, columns, values = template.numbers_over(x)
        varying: dict[int, list[int]] = {}  # amount -> which of ``columns`` are its own
        for i, column in enumerate(columns):
            varying.setdefault(column // len(AMOUNTS), []).append(i)
        table = np.empty((len(x), len(template.amounts)))
        moved = []
        for a, (amount, common) in enumerate(zip(template.amounts, first, strict=True)):
            own = varying.get(a, [])
            numbers = list(common)
            fields = [columns[i] % len(AMOUNTS) for i in own]
            for at in fields:
                common[at] = -1
            prices = self._prices.setdefault((amount.share, home, *common), {})
            total, column_s = 0, []
            for row in map(tuple, values[:, own].tolist() if own else [[]]):
                price = prices.get(row)
                if price is None:
                    for at, number in zip(fields, row, strict=True):
                        numbers[at] = number
                    price = prices[row] = self._ask(amount.sample, numbers, block)
                column_s.append(price[0])
                total += price[1]
            table[:, a] = column_s if own else column_s[0]
            moved.append(total if own else total * len(x))
        return table, moved

    def _ask(self, sample: Op, numbers: list[int], block: int) -> tuple[float, int]:
        """Seconds and bytes of one op."""
        part, n_parts, n_seqs, start, stop, n_new, n_recompute, n_ctx, *rest = numbers
        op = Op(
            sample.kind, block, sample.step, sample.layer, sample.batch, part, n_parts,
            sample.scope, n_seqs, start, stop, n_new, n_recompute, n_ctx, sample.attention,
            sample.reads, sample.writes, *rest,
        )  # fmt: skip
        self._n_prices += 1
        return checked_seconds(self._costs, op), int(self._costs.nbytes(op))

    def _forget(self) -> None:
        """Keep memory flat over any number of blocks."""
        if self.n_templates > _MAX_TEMPLATES:
            self._templates, self.n_templates = {}, 0
        if self._n_prices > _MAX_PRICES:
            self._prices, self._n_prices = {}, 0


def checked_seconds(costs: Costs, op: Op) -> float:
    """Seconds of an op; ``ValueError`` if they are not finite and >= 0."""
    seconds = float(costs.seconds(op))
    if not 0.0 <= seconds < inf:
        raise ValueError(f"seconds: {seconds} for op {op.key}, must be finite and >= 0")
    return seconds


def _take(
    left: Longs, guards: Guards, x: Floats, of_step: Longs, used: list[Template], template: Template
) -> Longs:
    """Give a template the steps that it holds for; the steps that are left."""
    holds = guards.satisfied(x[left])
    if holds.any():
        of_step[left[holds]] = len(used)
        used.append(template)
    return left[~holds]


def assemble(
    templates: Sequence[Template],
    of_step: Longs,
    numbers: Sequence[int],
    amounts: Longs,
    seconds: Floats,
    n_slots: int,
) -> Program:
    """Templates one after another; offsets into their slots move along."""

    def joined(name: str) -> Ints:
        return np.concatenate([getattr(template, name) for template in templates])

    def offsets(first: str) -> Longs:
        ends = [getattr(template, first) for template in templates]
        before = np.cumsum([0, *(int(end[-1]) for end in ends)])
        pieces = [end[:-1] + b for end, b in zip(ends, before[:-1], strict=True)]
        return np.append(np.concatenate(pieces), before[-1])

    return Program(
        step_template=of_step.astype(np.int32),
        step_number=np.array(numbers, np.int32),
        step_amounts=amounts,
        seconds=seconds,
        first_op=np.cumsum([0, *(t.n_ops for t in templates)]),
        lane_ops=np.array([t.lane_ops for t in templates]),
        lane=joined("lane").astype(np.uint8, copy=False),
        category=joined("category").astype(np.uint8, copy=False),
        flags=joined("flags").astype(np.uint8, copy=False),
        ahead=joined("ahead").astype(np.int8, copy=False),
        amount=joined("amount"),
        first_read=offsets("first_read"),
        read=joined("read"),
        first_write=offsets("first_write"),
        write=joined("write"),
        n_slots=max(1, n_slots),
    )
