"""Planning with the integer program: a coarse grid of recompute counts, then finer ones.

``policies.slot_problem`` states the program and ``policies.solver`` solves it for given candidates.
What readers get wrong: candidates are few (a solver's licence, and its time), so tokens are found
by refining around the optimum, with the incumbent, 0 and the whole context always among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policies.slot_problem import SlotProblem, Solution
from policies.solver import solve

_MAX_ROUNDS = 24  # four are usual


def plan(
    tabulate: Callable[[tuple[tuple[int, ...], ...]], SlotProblem],
    n_max: tuple[int, ...],
    solver: str = "auto",
    max_candidates: int = 33,
) -> Solution:
    """Best decision with N_b in ``0..n_max[b]``, to the token, from a few small programs.

    ``tabulate`` prices the candidates it is given. The first program spreads them over the whole
    range; each further one puts them between the two neighbours of every batch's optimum, and
    keeps 0, ``n_max[b]`` and the optimum itself, so no round is worse than the one before. It ends
    when each optimum was compared with the counts one above and one below it, and with the mean
    of all batches: like batches often have a ridge of equal decisions, of which the even one is
    wanted. The programs on the way only say where to look, and every solver gives the same
    decision: the dynamic program solves them, and ``solver`` the last. A valley narrower than the
    first spacing can be missed.
    """
    # The solver works on this module's types, so the import cannot stand at the top.
    if not n_max or min(n_max) < 0:
        raise ValueError(f"n_max: {n_max} must be one or more token counts >= 0")
    if max_candidates < 9:
        raise ValueError(
            f"max_candidates: {max_candidates} must be >= 9 (0, n_max, the mean rounded down and "
            "up, the optimum, its two neighbours, and one new count beside each)"
        )
    grid = tuple(_spread(0, top, max_candidates) for top in n_max)
    solve_s = 0.0
    for _ in range(_MAX_ROUNDS):
        if all(len(row) == top + 1 for row, top in zip(grid, n_max, strict=True)):
            break  # every count is a candidate
        best = solve(tabulate(grid), "dp")
        solve_s += best.solve_s
        finer = _refine(grid, best.n_recompute, max_candidates)
        if finer == grid:
            break
        grid = finer
    last = solve(tabulate(grid), solver)
    return replace(last, solve_s=solve_s + last.solve_s)


def _spread(low: int, high: int, n_points: int) -> tuple[int, ...]:
    """At most ``n_points >= 2`` evenly spaced integers from ``low`` to ``high``, both included."""
    steps = min(n_points - 1, high - low)
    if steps == 0:
        return (low,)
    return tuple(low + (high - low) * i // steps for i in range(steps + 1))


def _refine(
    grid: tuple[tuple[int, ...], ...], optimum: tuple[int, ...], max_candidates: int
) -> tuple[tuple[int, ...], ...]:
    """Candidates around ``optimum`` and at its mean; a row of ``grid`` that has them stays."""
    total, n = sum(optimum), len(optimum)
    mean = {total // n, -(-total // n)}
    side = (max_candidates - 7) // 2 + 2  # counts on each side, both ends included
    finer = []
    for row, best in zip(grid, optimum, strict=True):
        at = row.index(best)
        low, high = row[max(at - 1, 0)], row[min(at + 1, len(row) - 1)]
        even = {count for count in mean if count <= row[-1]}
        if best - low <= 1 and high - best <= 1 and even <= set(row):
            finer.append(row)
            continue
        window = (*_spread(low, best, side), *_spread(best, high, side))
        finer.append(tuple(sorted({0, *even, *window, row[-1]})))
    return tuple(finer)
