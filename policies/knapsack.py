"""The knapsack of one scheduling iteration: most value under GPU memory and the token budget.

    maximise sum(value_i x_i)  s.t.  sum((K_i + T_i) x_i) <= free,  sum(T_i x_i) <= budget

Two constraints make it hard, but not at this size: HiGHS solves a window of some hundred requests
in milliseconds, and the greedy set is what a scheduler can afford every iteration. What readers
get wrong: greedy by value per memory alone may be arbitrarily bad; the best of three orders is
taken, and ``gap`` measures what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from policies.errors import Infeasible


def exact(
    values: Sequence[float],
    memory_tokens: Sequence[int],
    budget_tokens: Sequence[int],
    free: int,
    budget: int,
) -> tuple[int, ...]:
    """Positions of an optimal set, increasing; ``Infeasible`` if the solver finds no optimum."""
    _check(values, memory_tokens, budget_tokens)
    fits = [
        i for i in range(len(values)) if memory_tokens[i] <= free and budget_tokens[i] <= budget
    ]
    if not fits:
        return ()
    memory = np.array([memory_tokens[i] for i in fits], dtype=float)
    budgets = np.array([budget_tokens[i] for i in fits], dtype=float)
    gain = np.array([values[i] for i in fits], dtype=float)
    result = milp(
        c=-gain,
        constraints=LinearConstraint(np.vstack([memory, budgets]), ub=[free, budget]),
        integrality=np.ones(len(fits), dtype=np.int64),
        bounds=Bounds(0.0, 1.0),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise Infeasible(f"knapsack of {len(fits)} requests: {result.message}")
    return tuple(i for i, x in zip(fits, result.x, strict=True) if x > 0.5)


def greedy(
    values: Sequence[float],
    memory_tokens: Sequence[int],
    budget_tokens: Sequence[int],
    free: int,
    budget: int,
) -> tuple[int, ...]:
    """Positions of the best of three first-fit sets, increasing.

    The orders are value per share of both resources, value per memory, and value alone; ties keep
    the order of arrival.
    """
    _check(values, memory_tokens, budget_tokens)
    fits = [
        i for i in range(len(values)) if memory_tokens[i] <= free and budget_tokens[i] <= budget
    ]
    if not fits:
        return ()
    need = sum(memory_tokens[i] for i in fits), sum(budget_tokens[i] for i in fits)
    if need[0] <= free and need[1] <= budget:
        return tuple(fits)
    by_memory = 1.0 / free
    by_budget = 1.0 / budget if budget else 0.0

    def per_share(i: int) -> float:
        share = memory_tokens[i] * by_memory + budget_tokens[i] * by_budget
        return -values[i] / share if share else -values[i]

    def per_memory(i: int) -> float:
        return -values[i] / memory_tokens[i] if memory_tokens[i] else -values[i]

    def alone(i: int) -> float:
        return -values[i]

    best: list[int] = []
    best_value = -1.0
    orders: tuple[Callable[[int], float], ...] = (per_share, per_memory, alone)
    for order in orders:
        chosen = _first_fit(sorted(fits, key=order), memory_tokens, budget_tokens, free, budget)
        value = sum(values[i] for i in chosen)
        if value > best_value:
            best, best_value = chosen, value
    return tuple(sorted(best))


def gap(
    values: Sequence[float],
    memory_tokens: Sequence[int],
    budget_tokens: Sequence[int],
    free: int,
    budget: int,
) -> float:
    """Share of the optimal value that the greedy set misses, 0..1."""
    best = sum(values[i] for i in exact(values, memory_tokens, budget_tokens, free, budget))
    found = sum(values[i] for i in greedy(values, memory_tokens, budget_tokens, free, budget))
    return 1.0 - found / best if best else 0.0


def _first_fit(
    order: Sequence[int],
    memory_tokens: Sequence[int],
    budget_tokens: Sequence[int],
    free: int,
    budget: int,
) -> list[int]:
    chosen = []
    for i in order:
        if memory_tokens[i] <= free and budget_tokens[i] <= budget:
            chosen.append(i)
            free -= memory_tokens[i]
            budget -= budget_tokens[i]
    return chosen


def _check(
    values: Sequence[float], memory_tokens: Sequence[int], budget_tokens: Sequence[int]
) -> None:
    if not len(values) == len(memory_tokens) == len(budget_tokens):
        raise ValueError(
            f"knapsack: {len(values)} values, {len(memory_tokens)} memory sizes and "
            f"{len(budget_tokens)} budgets must be as many of each"
        )
    if any(v < 0 for v in values):
        raise ValueError(f"values: {min(values)} must be >= 0")
