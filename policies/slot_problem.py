"""The integer program of one decode step: how much to recompute, which batch carries which slice.

One layer of a block is a cycle of slots. In slot b batch b computes while the links move the KV of
the *next* batch, ``(b + 1) % n_batches``, and the weight slices that batch b carries. That shift
is what readers get wrong: ``n_recompute[b]`` lengthens the compute of slot b and shortens the
transfer of slot b - 1, so neither can be chosen slot by slot.

    minimise  sum_b max(compute_s[b][N_b], h2d_b, disk_b)
    h2d_b  = kv_h2d_s[b+1][N_{b+1}]  + z_b * slice_h2d_s
    disk_b = kv_disk_s[b+1][N_{b+1}] + z_b * slice_disk_s
    sum_b z_b = n_slices,  z_b >= 0 integer,  N_b one of candidates[b]

With ``serial_links`` a slot waits for ``h2d_b + disk_b`` instead: the form printed in the TightLLM
paper (papers.md 2.3), which lets no disk read overlap a copy. Times are tabulated at the
candidates, so any measured curve is allowed.

Decisions are exact and do not depend on the solver, because times are compared as integers
(``quantum_s``) and ties have one winner. In this order: smallest objective, fewest recomputed
tokens, earliest slices (smallest ``sum_b b * z_b``); then, batch by batch from the first, N_b
nearest to the mean of all batches (the smaller of two), and more slices.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Table = tuple[tuple[float, ...], ...]

_QUANTUM_BITS = 20


@dataclass(frozen=True, slots=True)
class SlotProblem:
    """Tabulated slot times of one layer.

    ``compute_s[b][i]``, ``kv_h2d_s[b][i]`` and ``kv_disk_s[b][i]`` are seconds of batch b when it
    recomputes ``candidates[b][i]`` tokens: its own compute, and the transfers of its own KV (which
    run in the slot before). ``slice_h2d_s`` and ``slice_disk_s`` are seconds of one weight slice.
    """

    candidates: tuple[tuple[int, ...], ...]
    compute_s: Table
    kv_h2d_s: Table
    kv_disk_s: Table
    slice_h2d_s: float
    slice_disk_s: float
    n_slices: int
    serial_links: bool = False

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError("candidates: is empty, needs at least one batch")
        for b, row in enumerate(self.candidates):
            if not row or row[0] < 0 or any(high <= low for low, high in pairwise(row)):
                raise ValueError(
                    f"candidates[{b}]: {row} must be one or more strictly increasing token counts "
                    ">= 0"
                )
        shape = [len(row) for row in self.candidates]
        for name in ("compute_s", "kv_h2d_s", "kv_disk_s"):
            table: Table = getattr(self, name)
            if [len(row) for row in table] != shape:
                raise ValueError(
                    f"{name}: rows of {[len(row) for row in table]} values must match candidates, "
                    f"rows of {shape}"
                )
            for b, times in enumerate(table):
                for value in times:
                    _check_seconds(f"{name}[{b}]", value)
        _check_seconds("slice_h2d_s", self.slice_h2d_s)
        _check_seconds("slice_disk_s", self.slice_disk_s)
        if self.n_slices < 0:
            raise ValueError(f"n_slices: {self.n_slices} must be >= 0")

    @property
    def n_batches(self) -> int:
        """Batches of the block, one slot each."""
        return len(self.candidates)

    @property
    def quantum_s(self) -> float:
        """Seconds that one unit of the integer times stands for.

        The power of two that puts the longest tabulated time (all slices together count as one)
        into (2^19, 2^20] units. A power of two makes the decision invariant when every time is
        halved. Each table entry, and each slice, is rounded to the nearest unit.
        """
        slices_s = self.n_slices * max(self.slice_h2d_s, self.slice_disk_s)
        tables = (*self.compute_s, *self.kv_h2d_s, *self.kv_disk_s)
        longest_s = max(slices_s, *(max(row) for row in tables))
        if longest_s == 0.0:
            return 1.0
        mantissa, exponent = math.frexp(longest_s)
        unit_s = math.ldexp(1.0, exponent - _QUANTUM_BITS - (mantissa == 0.5))
        return max(unit_s, sys.float_info.min)


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: {value} must be a finite number of seconds >= 0")


@dataclass(frozen=True, slots=True)
class Solution:
    """A decision, and how it was found.

    ``objective_s`` is the unrounded objective of this decision; ``solver`` is the one that ran.
    """

    n_recompute: tuple[int, ...]
    slices: tuple[int, ...]
    objective_s: float
    solver: str
    solve_s: float = field(compare=False)


def objective(
    problem: SlotProblem, n_recompute_indices: Sequence[int], slices: Sequence[int]
) -> float:
    """Seconds of one layer: the sum of slot times for a decision, unrounded.

    ``n_recompute_indices[b]`` is a position in ``candidates[b]``, not a token count.
    """
    n = problem.n_batches
    if len(n_recompute_indices) != n or len(slices) != n:
        raise ValueError(
            f"decision: {len(n_recompute_indices)} indices and {len(slices)} slice counts, "
            f"must be {n} of each"
        )
    for b, index in enumerate(n_recompute_indices):
        if not 0 <= index < len(problem.candidates[b]):
            raise ValueError(
                f"n_recompute_indices[{b}]: {index} must be in 0..{len(problem.candidates[b]) - 1}"
            )
    if sum(slices) != problem.n_slices or min(slices) < 0:
        raise ValueError(
            f"slices: {tuple(slices)} must be >= 0 and sum to n_slices {problem.n_slices}"
        )
    total_s = 0.0
    for b, index in enumerate(n_recompute_indices):
        nxt = (b + 1) % n
        i_next = n_recompute_indices[nxt]
        h2d_s = problem.kv_h2d_s[nxt][i_next] + slices[b] * problem.slice_h2d_s
        disk_s = problem.kv_disk_s[nxt][i_next] + slices[b] * problem.slice_disk_s
        links_s = h2d_s + disk_s if problem.serial_links else max(h2d_s, disk_s)
        total_s += max(problem.compute_s[b][index], links_s)
    return total_s
