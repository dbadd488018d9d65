"""Prefix policies: how much of a cached prefix to recompute while the rest is loaded.

``LoadAll`` and ``RecomputeAll`` are the end points. ``Adaptive`` recomputes a tail from its token
ids until load and compute of the iteration end together: TightLLM's decision for one request of a
serving batch. ``Cake`` computes from the front while loading from the back. What readers get
wrong: the gain. Every recomputed token runs through all layers, so with overlap the time shrinks by
at most ``1 / (1 + kappa_crit)``, and without overlap the optimum is an end point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from policies.ilp import plan
from policies.slot_problem import SlotProblem
from policies.spec.request import Request


class Split(NamedTuple):
    """Cached tokens to recompute: the first ``n_head`` and the last ``n_tail``; the rest loads."""

    n_head: int = 0
    n_tail: int = 0


class Totals(NamedTuple):
    """Seconds of one iteration, all layers: transfers into GPU memory, compute, and the whole.

    With overlap the whole is the longer of both and one layer of the shorter, with which the
    pipeline fills and drains.
    """

    load_s: float
    compute_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class IterationView:
    """What a prefix policy may know of the iteration that a request enters.

    ``overlap``: loads run layer by layer beside compute. ``budget_tokens`` tokens may be computed
    in this iteration beyond everybody's new ones. ``totals(split)`` predicts the iteration with
    all admitted requests, those decided before as they were decided and later ones loaded; the LM
    head, which no load can hide behind, is left out. ``head_s(n)`` is the time to compute the
    first n tokens of the prefix, ``load_s(n)`` that to load n tokens.
    """

    overlap: bool
    budget_tokens: int
    totals: Callable[[Split], Totals]
    head_s: Callable[[int], float]
    load_s: Callable[[int], float]


class PrefixPolicy(Protocol):
    """Decides for one admitted request; later ones of the same iteration see what it decided."""

    @property
    def name(self) -> str:
        """Name in results."""
        ...

    def split(self, request: Request, view: IterationView) -> Split:
        """Tokens to recompute, at most ``request.n_cached``."""
        ...


@dataclass(frozen=True, slots=True)
class LoadAll:
    """Every cached token is loaded (LMCache, vLLM with KV offloading)."""

    name: str = "load-all"

    def split(self, request: Request, view: IterationView) -> Split:  # noqa: ARG002
        """Nothing recomputed."""
        return Split()


@dataclass(frozen=True, slots=True)
class RecomputeAll:
    """Every cached token is computed again: no KV store at all."""

    name: str = "recompute-all"

    def split(self, request: Request, view: IterationView) -> Split:  # noqa: ARG002
        """Everything recomputed."""
        return Split(n_tail=request.n_cached)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Recompute the smallest tail with which the load takes no longer than the compute.

    With constant rates that is ``ceil((K - kappa_crit T) / (1 + kappa_crit))``, the closed form of
    TightLLM's integer program (DESIGN section 1). ``solver`` None finds the crossing by bisection,
    which needs only that load falls and compute grows with the tail; ``auto``, ``gurobi``,
    ``highs`` or ``dp`` solve the integer program itself, which may stop one token earlier. Only a
    tail that shortens the iteration by more than the share ``min_gain`` is taken; None takes any,
    also where filling the pipeline costs more than the balance saves. Without overlap, load and
    compute add up and the better end point is taken.
    """

    solver: str | None = None
    min_gain: float | None = 0.0
    name: str = "adaptive"

    def __post_init__(self) -> None:
        if self.min_gain is not None and not 0.0 <= self.min_gain < 1.0:
            raise ValueError(f"prefix.min_gain: {self.min_gain} must be in [0, 1) or null")

    def split(self, request: Request, view: IterationView) -> Split:
        """A tail of at most the tokens that the budget leaves."""
        most = min(request.n_cached, max(0, view.budget_tokens))
        none = view.totals(Split())
        if most == 0 or (view.overlap and none.load_s <= none.compute_s):
            return Split()
        if not view.overlap:
            tail = most
        elif self.solver is None:
            tail = _crossing(most, lambda n: view.totals(Split(n_tail=n)))
        else:
            tail = _solved(most, lambda n: view.totals(Split(n_tail=n)), self.solver)
        least = self.min_gain
        if least is None and not view.overlap:
            least = 0.0
        if least is not None:
            gain = 1.0 - view.totals(Split(n_tail=tail)).whole_s / none.whole_s
            tail = tail if gain > least else 0
        return Split(n_tail=tail)


@dataclass(frozen=True, slots=True)
class Cake:
    """Compute chunks from the front and load chunks from the back until they meet.

    Cake (arXiv 2410.03065): each side takes its next chunk when it has finished one, so the meeting
    point follows from the speeds and is not planned. Early tokens have little context, so a
    front chunk costs less attention than a tail of the same size. Needs overlap; without it all
    is loaded. What the budget does not leave room for is loaded.
    """

    chunk_tokens: int = 512
    name: str = "cake"

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"prefix.chunk_tokens: {self.chunk_tokens} must be >= 1")

    def split(self, request: Request, view: IterationView) -> Split:
        """Whole chunks at the head (the last chunk of the prefix may be short)."""
        n_chunks = -(-request.n_cached // self.chunk_tokens)
        chunk_s = view.load_s(self.chunk_tokens)
        if not view.overlap or n_chunks == 0 or chunk_s <= 0.0:
            return Split()

        def takes(chunk: int) -> bool:
            """Whether the compute side comes to ``chunk`` before the load side has taken it."""
            loads_begun = int(view.head_s(chunk * self.chunk_tokens) / chunk_s) + 1
            return chunk < n_chunks - loads_begun

        low, high = 0, min(n_chunks, max(0, view.budget_tokens) // self.chunk_tokens)
        while low < high:  # first chunk that it does not take
            middle = (low + high) // 2
            if takes(middle):
                low = middle + 1
            else:
                high = middle
        return Split(n_head=min(request.n_cached, low * self.chunk_tokens))


def _crossing(most: int, totals: Callable[[int], Totals]) -> int:
    """Smallest n in ``1..most`` with load <= compute; ``most`` if there is none."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        found = totals(middle)
        if found.load_s <= found.compute_s:
            high = middle
        else:
            low = middle + 1
    return low


def _solved(most: int, totals: Callable[[int], Totals], solver: str) -> int:
    """The same decision from the integer program of one batch without weights to load."""

    def tabulate(candidates: tuple[tuple[int, ...], ...]) -> SlotProblem:
        times = [totals(n) for n in candidates[0]]
        loads = tuple(t.load_s for t in times)
        return SlotProblem(
            candidates=candidates,
            compute_s=(tuple(t.compute_s for t in times),),
            kv_h2d_s=(loads,),
            kv_disk_s=((0.0,) * len(loads),),
            slice_h2d_s=0.0,
            slice_disk_s=0.0,
            n_slices=0,
        )

    return plan(tabulate, (most,), solver).n_recompute[0]
