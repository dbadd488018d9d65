"""What the homes of a batch's stored tokens hold: ranges of layer inputs and of KV.

A token is stored once, as its KV or as the layer's input from which K and V are projected again,
and its home never changes. What readers get wrong: ranges alternate, inputs first, and there are
four of them at most, some empty: ends of ranges are numbers that grow over the steps, so steps that
differ in nothing else have the same structure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from policies.plan.op import Keyword


class Source(Keyword):
    """What a home holds of a token."""

    KV = "kv"
    INPUT = "input"  # the layer's input, from which K and V are projected


class Held(NamedTuple):
    """Tokens ``[start, stop)`` of each sequence, and what their home holds."""

    start: int
    stop: int
    source: Source


class Homes(NamedTuple):
    """Ends of the ranges that tile ``[0, n_stored)``: inputs, KV, inputs, KV."""

    inputs: int = 0
    kv: int = 0
    more_inputs: int = 0
    more_kv: int = 0

    @classmethod
    def headed(cls, head: int, n_stored: int) -> Homes:
        """Homes that hold inputs of the first ``head`` tokens, and KV of the others."""
        return cls(min(head, n_stored), n_stored, n_stored, n_stored)

    @property
    def n_stored(self) -> int:
        """Tokens that have a home: the first so many."""
        return self.more_kv

    @property
    def n_inputs(self) -> int:
        """Stored tokens whose home holds the layer's input."""
        return self.inputs + self.more_inputs - self.kv

    def ranges(self, start: int, stop: int) -> Iterator[Held]:
        """What is held of tokens ``[start, stop)``, in order, no range empty."""
        low = 0
        for i, end in enumerate(self):
            first, last = max(low, start), min(stop, end)
            if first < last:
                yield Held(first, last, Source.KV if i % 2 else Source.INPUT)
            low = end

    def append(self, stop: int, n_inputs: int) -> Homes:
        """Homes after tokens ``[n_stored, stop)`` are stored, the first ``n_inputs`` as inputs.

        ``ValueError`` if that needs a fifth range.
        """
        middle = self.n_stored + n_inputs
        if not self.n_stored <= middle <= max(self.n_stored, stop):
            raise ValueError(
                f"decision.n_inputs: {n_inputs} must be in 0..{max(stop - self.n_stored, 0)}, the "
                "tokens that are stored"
            )
        return self._grown(middle, Source.INPUT)._grown(stop, Source.KV)

    def _grown(self, stop: int, source: Source) -> Homes:
        stored = self.n_stored
        if stop <= stored:
            return self
        last = next(i for i, end in enumerate(self) if end == stored)  # the last that holds some
        if (last % 2 == 0) != (source is Source.INPUT):
            last += 1
        if last >= len(self):
            raise ValueError(
                f"decision.n_inputs: the homes {tuple(self)} cannot take more inputs behind the "
                "second range of KV"
            )
        return Homes(*(stop if i >= last else end for i, end in enumerate(self)))
