"""The templates made so far, and which of them each step of a block has.

Steps that are cut into slices in many ways share templates that leave the number of slices open;
where there are few ways, or such templates cannot be made, each way has its own. What readers get
wrong: templates are looked up by numbers of a step to find them soon. Whether one holds is decided
by its guards alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.arrays import Floats, Longs
from sim.forms import Forms
from sim.maker import TemplateMaker
from sim.template import Template
from sim.tracing import Step

_MAX_TEMPLATES = 2048  # kept for later blocks; about 0.1 MB each
_MAX_WAYS = 2  # to cut weights, among steps that are otherwise alike, with templates of their own

Key = tuple[object, ...]


class Library:
    """Templates of one policy, model and placement."""

    def __init__(self, maker: TemplateMaker) -> None:
        self._maker = maker
        self._templates: dict[Key, list[Template]] = {}
        self._ways: dict[Key, set[Key]] = {}
        self.n_templates = 0  # made so far and kept

    def forget(self) -> None:
        """Keep memory flat over any number of blocks."""
        if self.n_templates > _MAX_TEMPLATES:
            self._templates, self._ways, self.n_templates = {}, {}, 0

    def assign(self, steps: Sequence[Step], x: Floats) -> tuple[list[Template], Longs]:
        """The templates that steps of variables ``x`` use, and the number of each step's own."""
        alike: dict[Key, list[int]] = {}
        for i, (ctx, _, then) in enumerate(steps):
            key: Key = (ctx.n_batches, x.shape[1], ctx.is_prefill, then is None)
            alike.setdefault(key, []).append(i)
        block = _Block(steps, x, self._maker.questions(x.shape[1]))
        for key, members in alike.items():
            left = self._known((*key, "open"), block, np.array(members))
            ways = self._ways.setdefault(key, set())
            ways.update(steps[i][1].slices for i in left.tolist())
            if len(ways) > _MAX_WAYS:
                left = self._open((*key, "open"), block, left)
            for slices, own in block.by_slices(left).items():
                self._exact((*key, slices), block, own)
        return block.used, block.of_step

    def _known(self, key: Key, block: _Block, left: Longs) -> Longs:
        """Give known templates the steps that they hold for; the steps that are left."""
        for template in self._templates.setdefault(key, []):
            if not left.size:
                break
            left = block.take(template, left)
        return left

    def _open(self, key: Key, block: _Block, left: Longs) -> Longs:
        """Make templates that leave slices open, as long as that works; the steps that are left."""
        while left.size:
            template = self._maker.make_open(block.steps[left[0]], block.x[left])
            if template is None:
                break
            left = self._add(key, block, template, left)
        return left

    def _exact(self, key: Key, block: _Block, left: Longs) -> None:
        """Give all of some steps templates for steps of just their slices."""
        left = self._known(key, block, left)
        while left.size:
            left = self._add(key, block, self._maker.make(block.steps[left[0]]), left)

    def _add(self, key: Key, block: _Block, template: Template, left: Longs) -> Longs:
        """Keep a template that was made for the first of some steps; the steps that are left."""
        self._templates[key].append(template)
        self.n_templates += 1
        first, left = left[0], block.take(template, left)
        if first in left:
            raise AssertionError("template: does not hold for the step it is made from")
        return left


class _Block:
    """The steps of a block, their numbers, and the templates they have so far."""

    def __init__(self, steps: Sequence[Step], x: Floats, questions: Forms) -> None:
        self.steps, self.x, self._questions = steps, x, questions
        self._answers = questions.values(x)
        self.used: list[Template] = []
        self.of_step = np.zeros(len(steps), np.int64)

    def take(self, template: Template, left: Longs) -> Longs:
        """Give a template the steps that it holds for; the steps that are left."""
        known = len(self._answers)
        if known < len(self._questions):
            new = self._questions.values(self.x, known)
            self._answers = np.concatenate((self._answers, new))
        holds = template.guards.satisfied(self._answers, left)
        if holds.any():
            self.of_step[left[holds]] = len(self.used)
            self.used.append(template)
        return left[~holds]

    def by_slices(self, left: Longs) -> dict[Key, Longs]:
        """Steps by how they are cut into slices."""
        found: dict[Key, list[int]] = {}
        for i in left.tolist():
            found.setdefault(self.steps[i][1].slices, []).append(i)
        return {slices: np.array(own) for slices, own in found.items()}
