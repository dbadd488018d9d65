"""Solvers of the integer program: Gurobi, HiGHS, or the exact dynamic program alone.

A mixed-integer solver proves the least objective; it does not say *which* of several optimal
decisions is returned, and that depends on its version. So the decision never comes from its
variables: the dynamic program of ``policies.chain`` walks the optimal decisions and takes the one
that the tie-break of ``policies.ilp`` names, and the two optima must agree to the unit. Both get
the program after the same pruning by bounds, which removes no optimal decision.

Only this module imports gurobipy, and only when a solve asks for it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from policies.chain import Chain, Quantised, prune
from policies.slot_problem import SlotProblem, Solution, objective

SOLVERS = ("auto", "gurobi", "highs", "dp")

# Deterministic effort limits (never wall time): past them ``auto`` takes the dynamic program.
_GUROBI_WORK = 1.0  # about as many seconds
_HIGHS_NODES = 5_000


class SolverUnavailableError(Exception):
    """``solver`` cannot be used for this problem here; ``reason`` says why."""

    def __init__(self, solver: str, reason: str) -> None:
        self.solver = solver
        self.reason = reason
        super().__init__(f"solver {solver}: {reason}")


class SolverStoppedError(SolverUnavailableError):
    """The solver ran and proved no optimum: effort limit, or a claim that is not feasible."""


def solve(problem: SlotProblem, solver: str = "auto") -> Solution:
    """Decision of ``problem``; the same whichever solver runs.

    ``auto`` takes Gurobi, or HiGHS where Gurobi is absent, refuses (its bundled licence ends at
    2000 variables) or has expired; where neither proves an optimum within its effort limit, the
    dynamic program answers alone. ``Solution.solver`` says which it was. A solver asked for by
    name raises ``SolverUnavailableError`` instead, an unknown name ``ValueError``.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver: {solver!r} is none of {', '.join(SOLVERS)}")
    start_s = time.perf_counter()
    exact = prune(Quantised.of(problem))
    chain = Chain(exact)
    used = _prove(exact, chain.optimum, solver)
    n_recompute, slices = chain.decision()
    indices = [row.index(n) for row, n in zip(problem.candidates, n_recompute, strict=True)]
    return Solution(
        n_recompute=n_recompute,
        slices=slices,
        objective_s=objective(problem, indices, slices),
        solver=used,
        solve_s=time.perf_counter() - start_s,
    )


def _prove(exact: Quantised, optimum: int, solver: str) -> str:
    """Name of the solver that proved ``optimum``; the dynamic program has, when no other can."""
    for name in ("gurobi", "highs") if solver == "auto" else (solver,):
        if name == "dp":
            break
        try:
            claim = _gurobi_optimum(exact) if name == "gurobi" else _highs_optimum(exact)
            if claim != optimum:  # a tolerance inside the solver hid a better decision
                raise SolverStoppedError(name, f"claims {claim} units, {optimum} are feasible")
            return name
        except SolverUnavailableError as error:
            if solver != "auto":
                raise
            if isinstance(error, SolverStoppedError):
                break  # HiGHS needs longer than Gurobi
    return "dp"


# ---- the mixed-integer program ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Program:
    """min sum(t) over (x, z, t): one-hot choices x, slices z, slot times t.

    ``equal @ v == equal_rhs`` and ``least @ v >= 0``; columns of batch b's choices start at
    ``first[b]``.
    """

    cost: npt.NDArray[np.float64]
    equal: npt.NDArray[np.float64]
    equal_rhs: npt.NDArray[np.float64]
    least: npt.NDArray[np.float64]
    first: tuple[int, ...]
    n_choices: int
    upper: npt.NDArray[np.float64]


def _program(exact: Quantised) -> _Program:
    n = exact.n_batches
    sizes = [len(row) for row in exact.tokens]
    first = tuple(int(v) for v in np.concatenate(([0], np.cumsum(sizes))))
    n_choices = first[-1]
    n_vars = n_choices + 2 * n
    z, t = n_choices, n_choices + n
    equal = np.zeros((n + 1, n_vars))
    least = np.zeros((n * (1 + len(exact.links)), n_vars))
    for b in range(n):
        nxt = (b + 1) % n
        own, following = slice(first[b], first[b + 1]), slice(first[nxt], first[nxt + 1])
        equal[b, own] = 1.0
        least[b, t + b] = 1.0
        least[b, own] = -exact.compute[b]
        for k, (kv, one) in enumerate(zip(exact.links, exact.per_slice, strict=True), start=1):
            row = least[k * n + b]
            row[t + b] = 1.0
            row[z + b] = -one
            row[following] = -kv[nxt]
    equal[n, z:t] = 1.0
    upper = np.full(n_vars, np.inf)
    upper[:z] = 1.0
    upper[z:t] = exact.n_slices
    cost = np.zeros(n_vars)
    cost[t:] = 1.0
    rhs = np.ones(n + 1)
    rhs[n] = exact.n_slices
    return _Program(cost, equal, rhs, least, first[:-1], n_choices, upper)


def _value_of(
    exact: Quantised, program: _Program, values: npt.NDArray[np.float64], name: str
) -> int:
    """Objective, in units, of the decision that a solver's variables spell."""
    n = exact.n_batches
    indices = [
        int(np.argmax(values[start : start + len(row)]))
        for start, row in zip(program.first, exact.tokens, strict=True)
    ]
    slices = [round(v) for v in values[program.n_choices : program.n_choices + n]]
    if sum(slices) != exact.n_slices:
        raise SolverStoppedError(name, f"returned slices {slices}, not {exact.n_slices} in total")
    return exact.value(indices, slices)


@lru_cache(maxsize=1)
def _gurobi_env(pid: int) -> Any:  # noqa: ARG001 - a forked child must not share its parent's
    """One silent Gurobi environment per process: starting one costs more than a solve."""
    import gurobipy

    return gurobipy.Env(
        params={
            "OutputFlag": 0,
            "Threads": 1,
            "Seed": 0,
            # The objective is a whole number of units: a bound within one unit is a proof.
            "MIPGap": 0.0,
            "MIPGapAbs": 0.999,
            # Programs this small branch faster than they are cut or guessed at.
            "Cuts": 0,
            "Heuristics": 0.0,
            "IntFeasTol": 1e-9,
            "FeasibilityTol": 1e-9,
            "OptimalityTol": 1e-9,
            "WorkLimit": _GUROBI_WORK,
        }
    )


def _gurobi_optimum(exact: Quantised) -> int:
    try:
        import gurobipy
        from gurobipy import GRB
    except ImportError as error:
        raise SolverUnavailableError("gurobi", f"gurobipy cannot be imported ({error})") from error
    program = _program(exact)
    n, choices = exact.n_batches, program.n_choices
    kinds = np.array([GRB.BINARY] * choices + [GRB.INTEGER] * n + [GRB.CONTINUOUS] * n)
    try:
        with gurobipy.Model(env=_gurobi_env(os.getpid())) as model:
            v = model.addMVar(kinds.size, ub=program.upper, obj=program.cost, vtype=kinds)
            model.addMConstr(program.equal, v, "=", program.equal_rhs)
            model.addMConstr(program.least, v, ">", np.zeros(len(program.least)))
            model.optimize()
            if model.Status != GRB.OPTIMAL:
                raise SolverStoppedError("gurobi", f"stopped with status {model.Status}")
            values = np.asarray(v.X)
    except gurobipy.GurobiError as error:
        raise SolverUnavailableError("gurobi", f"{error} (code {error.errno})") from error
    return _value_of(exact, program, values, "gurobi")


def _highs_optimum(exact: Quantised) -> int:
    program = _program(exact)
    n, choices = exact.n_batches, program.n_choices
    result = milp(
        program.cost,
        integrality=np.concatenate((np.ones(choices + n), np.zeros(n))),
        bounds=Bounds(np.zeros(program.cost.size), program.upper),
        constraints=[
            LinearConstraint(program.equal, program.equal_rhs, program.equal_rhs),
            LinearConstraint(program.least, 0.0, np.inf),
        ],
        options={"mip_rel_gap": 0.0, "node_limit": _HIGHS_NODES},
    )
    if result.status != 0:
        raise SolverStoppedError("highs", f"{result.message} (status {result.status})")
    return _value_of(exact, program, result.x, "highs")
