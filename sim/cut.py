"""A model cut to a few layers: enough to see how its plan repeats.

Layers of one class (the same homes of their weights, dense or expert) follow one another in runs.
The longest run is shortened, the others stay whole. What readers get wrong: not any length will do.
Buffers are used in turns, and a step that uses an odd number of turns shifts those of the next; so
a cut takes away a multiple of ``period`` layers, the number after which all turns are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from policies.placement import Placement, Shares
from policies.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Cut:
    """``model`` and homes of its ``weights``; ``classes`` numbers each layer's class, -1 last.

    The last entry is the LM head, which counts as a layer behind all others.
    """

    model: ModelSpec
    weights: tuple[tuple[Shares, Shares], ...]
    classes: tuple[int, ...]


class Cutter:
    """Cuts one model under one placement."""

    def __init__(self, model: ModelSpec, placement: Placement) -> None:
        self._model, self._placement = model, placement
        numbers: dict[tuple[object, bool], int] = {}
        kinds = ((placement.weights[i], model.is_moe(i)) for i in range(model.n_layers))
        self.classes = (*(numbers.setdefault(kind, len(numbers)) for kind in kinds), -1)
        runs = [len(list(run)) for _, run in groupby(self.classes[:-1])]
        self.longest = max(runs)
        self._first = sum(runs[: runs.index(self.longest)])

    def lengths(self, period: int) -> range:
        """How many layers to leave of the longest run, fewest first.

        At most ten beyond a period, and at least two periods less than all.
        """
        least = period + (self.longest - period) % period
        return range(least + period, min(self.longest - 2 * period, 10 + period) + 1, period)

    def cut(self, n: int) -> Cut:
        """The model with ``n`` layers left of its longest run."""
        gone = range(self._first + n, self._first + self.longest)
        kept = [i for i in range(self._model.n_layers) if i not in gone]
        model = replace(self._model, n_layers=len(kept))
        if self._model.n_experts:
            n_dense = sum(not self._model.is_moe(i) for i in kept)
            model = replace(model, n_dense_layers=n_dense)
        return Cut(
            model,
            tuple(self._placement.weights[i] for i in kept),
            tuple(self.classes[i] for i in (*kept, self._model.n_layers)),
        )
