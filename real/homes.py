"""Which row of its home a token has: homes hold only the tokens that a plan stores in them.

A batch's tokens are stored in order, some as KV and some as layer inputs, each kind in a home of
its own without gaps: a token's row is its rank among the stored tokens of its kind. What readers
get wrong: rows follow from the stores of the plan, so they are known only after the dry pass; and
tokens of one kind that are neighbours keep neighbouring rows, so a range moves in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from policies.homes import Source
from policies.plan.op import Op, Scope


class Tokens(NamedTuple):
    """Tokens ``[start, stop)`` of each sequence of a batch."""

    start: int
    stop: int

    @property
    def n_tokens(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(slots=True)
class Ranges:
    """Disjoint ranges of tokens in the order in which they came; rows count through them."""

    spans: list[Tokens] = field(default_factory=list)
    n_rows: int = 0

    def add(self, start: int, stop: int) -> None:
        """Take a range, once: two halves of one copy name it twice. ``ValueError`` if it overlaps
        others or lies before them.
        """
        if start >= stop or self.row(start, stop) is not None:
            return
        end = self.spans[-1].stop if self.spans else 0
        if start < end:
            raise ValueError(f"tokens {start}..{stop} come after tokens up to {end}")
        if self.spans and start == end:
            self.spans[-1] = Tokens(self.spans[-1].start, stop)
        else:
            self.spans.append(Tokens(start, stop))
        self.n_rows += stop - start

    def row(self, start: int, stop: int) -> int | None:
        """Row of token ``start`` if all of ``[start, stop)`` are here, else None."""
        before = 0
        for span in self.spans:
            if span.start <= start and stop <= span.stop:
                return before + start - span.start
            before += span.n_tokens
        return None


def source_of(op: Op) -> Source:
    """What a transfer between homes and the GPU moves."""
    return Source.INPUT if op.scope is Scope.INPUT else Source.KV


def home_region(op: Op) -> str:
    """Name of the home on disk that a KV or input op reads or writes."""
    kind = "inputs" if op.scope is Scope.INPUT else "kv"
    return f"{kind}/l{op.layer}/b{op.batch}"
