"""Making templates: from a cut model where that will do, and for any number of turns of loops.

What readers get wrong: neither is taken on trust. In prefill and in decode, the first template
from a cut model is compared with that of the whole model, and the first that leaves its loops open
with one made for the step at hand. If they differ the policy has a way that cutting, or counting,
does not see, and such steps are not cut, or counted, any more.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import numpy as np

from policies.cost.model import CostModel
from policies.drive import Policy
from sim.arrays import Floats
from sim.assembly import assemble
from sim.cut import Cut, Cutter
from sim.forms import Forms
from sim.loops import few_turns, with_loops
from sim.stretch import Plan, expand, stretch, unstretched
from sim.symbol import Guard
from sim.template import Families, Template
from sim.tracing import Ref, Step, Traced, emit, trace, variables

Found = tuple[Plan, frozenset[Guard]]


class TemplateMaker:
    """Makes templates for one policy, model and placement."""

    def __init__(self, policy: Policy, cutter: Cutter, families: Families) -> None:
        self._policy, self._cutter, self._families = policy, cutter, families
        buffers = policy.buffers
        turns = (
            buffers.weight_slots, buffers.kv_in_slots, buffers.kv_out_slots, buffers.input_slots,
        )  # fmt: skip
        self._period = lcm(*(max(1, n) for n in turns))
        self._cuts: dict[bool, bool] = {}  # whether cutting is right in prefill, in decode
        self._counts: dict[bool, bool] = {}  # whether counting is
        self._short_models: dict[int, tuple[Cut, CostModel]] = {}
        self._questions: dict[int, Forms] = {}

    def questions(self, n_variables: int) -> Forms:
        """Forms that guards of templates over so many variables ask about."""
        return self._questions.setdefault(n_variables, Forms())

    def make(self, step: Step) -> Template:
        """The template of a step; ``UntraceableError`` if the policy cannot be traced."""
        phase = step[0].is_prefill
        found = self._short(step) if self._cuts.get(phase, True) else None
        if found is None:
            self._cuts[phase] = False
            found = self._whole(step)
        elif phase not in self._cuts:
            whole = self._whole(step)
            self._cuts[phase] = found[0].same_ops(whole[0]) and found[1] == whole[1]
            found = whole
        template = self._assembled(found, variables([step]))
        if template is None:
            raise AssertionError("template: only loops can be torn apart, and there are none")
        return template

    def make_open(self, step: Step, x: Floats) -> Template | None:
        """One that leaves open how many turns the step's loops take; None if that cannot be.

        It takes as many as there are in steps of variables ``x``, (n_steps, n_variables).
        """
        phase = step[0].is_prefill
        if not self._counts.get(phase, True):
            return None
        exact = self.make(step) if phase not in self._counts else None
        template, row = self._open(step, x), variables([step])
        answers = self.questions(x.shape[1]).values(row)
        if template and not template.guards.satisfied(answers, np.zeros(1, np.int64))[0]:
            template = None
        if template and exact and not template.same_step(exact, row[0]):
            template = None
        self._counts[phase] = template is not None
        return template

    def _open(self, step: Step, x: Floats) -> Template | None:
        counted, found = few_turns(step), None
        try:
            if self._cuts[step[0].is_prefill]:
                found = self._short(counted, counting=True)
            found = found or self._whole(counted, counting=True)
        except ValueError:  # the policy refuses to cut weights like that
            return None
        return self._assembled(found, x)

    def _assembled(self, found: Found, x: Floats) -> Template | None:
        return assemble(*found, x, self._cutter, self._families, self.questions(x.shape[1]))

    def _short(self, step: Step, counting: bool = False) -> Found | None:
        """From a cut model; None if none that is shorter will do."""
        for n in self._cutter.lengths(self._period):
            short = trace(self._policy, self._cutter.cut(n), step, counting)
            period = lcm(self._period, *short.moduli)
            if period != self._period:
                self._period = period
                return self._short(step, counting)
            refs, guards = _named(short, counting)
            long = emit(self._policy, *self._short_model(n + period, step), step)
            repeats = (self._cutter.longest - n) // period
            stretched = stretch(short.plain, long, refs, period, repeats)
            if stretched is not None:
                plan = expand(stretched)
                classes = np.array(self._cutter.classes)
                if (classes[plan.layers[:, 0]] == plan.layer_class).all():
                    return plan, guards
        return None

    def _short_model(self, n: int, step: Step) -> tuple[Cut, CostModel]:
        """A cut model and what the policy believes of it."""
        if n not in self._short_models:
            cut, ctx = self._cutter.cut(n), step[0]
            placement = replace(ctx.placement, weights=cut.weights)
            self._short_models[n] = (cut, CostModel(cut.model, ctx.hardware, placement))
        return self._short_models[n]

    def _whole(self, step: Step, counting: bool = False) -> Found:
        cut = self._cutter.cut(self._cutter.longest)
        refs, guards = _named(trace(self._policy, cut, step, counting), counting)
        return expand(unstretched(refs)), guards


def _named(traced: Traced, counting: bool) -> tuple[list[Ref], frozenset[Guard]]:
    return with_loops(traced) if counting else (traced.refs, traced.guards)
