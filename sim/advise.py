"""Advice: which way to run a workload is best, what it waits for, and what would make it faster.

Enumeration with bounds finds the best candidate and the best of every policy; more of one resource
at a time, decided anew, gives elasticities; machines drawn around the profile give the uncertainty.
What readers get wrong: an elasticity is local. It says what ten per cent more of a resource gain
now, and stops being true as soon as something else becomes the bottleneck; memory helps in steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from policies.drive import Policy
from policies.flexgen import FlexGen
from policies.hybridserve import HybridServe
from policies.kvpr import Kvpr
from policies.spec.factors import with_factors
from policies.tightllm import TightLLM
from sim.candidates import Candidate, Space
from sim.elasticity import Elasticity, Now, elasticity
from sim.replay import Replay
from sim.resources import RESOURCES, draw, sigmas
from sim.run import RunSpec
from sim.search import Bounded, Machine, Objective, Tried, best_first, places_slowly

QUANTILES = (0.1, 0.5, 0.9)
FINER_TRIES = 4  # simulations between the powers of two: their bounds hardly differ
SLOW_TRIES, SLOW_FINER_TRIES = 2, 1  # where a job takes seconds to place
FINER_NEAR = 0.8  # of the best value: policies that other sizes and slices could make the best
NEAR = 0.5  # of the best value: policies that a little more memory could make the best
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AdviseSettings:
    """What is asked. ``change`` is the relative increase of a resource, ``tries`` how many
    candidates are simulated on a changed machine, ``sigma`` overrides deviations by kind.
    """

    objective: Objective = field(default_factory=Objective)
    n_batches: tuple[int, ...] = (1, 2, 4, 8)
    max_batch_size: int = 1024
    placements: tuple[str, ...] = ("host", "auto", "flexgen")
    slices_per_batch: tuple[int | None, ...] = (None, 1, 16)
    change: float = 0.1
    tries: int = 1
    n_samples: int = 64
    sigma: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 < self.change <= 1.0:
            raise ValueError(f"advise.change: {self.change} must be in (0, 1]")
        for name, least in (("tries", 1), ("n_samples", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"advise.{name}: {getattr(self, name)} must be >= {least}")

    def space(self, policies: Mapping[str, Policy]) -> Space:
        """What is enumerated."""
        return Space(
            policies, self.n_batches, self.max_batch_size, self.placements, self.slices_per_batch
        )


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best setting of one policy. ``low``, ``median``, ``high`` are deciles of its value over
    the drawn machines, ``wins`` the share of them on which no other policy's best is better.
    """

    tried: Tried
    value: float
    low: float | None = None
    median: float | None = None
    high: float | None = None
    wins: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer; ``ranking`` is by value, its first is the best there is.

    ``spread`` are the shares of the variance of the best's value that single numbers of the profile
    explain. ``reason`` says why there is no answer where ``ranking`` is empty.
    """

    ranking: tuple[Ranked, ...]
    elasticities: tuple[Elasticity, ...]
    spread: Mapping[str, float]
    n_candidates: int
    n_unfit: int
    n_simulated: int
    seconds: Mapping[str, float]
    reason: str = ""


def advise(
    base: RunSpec,
    policies: Mapping[str, Policy],
    settings: AdviseSettings,
    say: Say = lambda _line: None,
) -> Advice:
    """The best ways to run ``base``'s workload on its machine; its policy and sizes are ignored.

    ``say`` is told how far it is. A workload none of whose requests can run raises ``Infeasible``.
    """
    clock = _Clock()
    space = settings.space(policies)
    machine = Machine(base, base.hardware, settings.objective)
    bounded = machine.enumerate(space)
    clock.lap("bound")
    say(f"{len(bounded)} candidates, {machine.n_unfit} more do not fit ({clock})")
    ranking = _rank(machine, bounded, space)
    clock.lap("search")
    if not ranking:
        reason = _why_not(machine, bounded)
        return Advice((), (), {}, len(bounded), machine.n_unfit, machine.n_simulated,
                      clock.laps, reason)  # fmt: skip
    say(f"best of each policy found in {machine.n_simulated} simulations ({clock})")
    replays = [
        Replay(machine.spec(r.tried.candidate), machine.known, machine.placed(r.tried.candidate))
        for r in ranking
    ]
    near = {r.tried.candidate.name: policies[r.tried.candidate.name] for r in ranking
            if r.value >= NEAR * ranking[0].value
            and (r == ranking[0] or not places_slowly(r.tried.candidate.policy))}  # fmt: skip
    quick = [item for item in bounded if item.candidate.name in near]
    found = Now(machine, quick, settings.space(near), ranking[0].tried, replays[0])
    elasticities = tuple(
        elasticity(found, name, 1.0 + settings.change, settings.tries) for name in RESOURCES
    )
    clock.lap("elasticity")
    say(f"more of each resource tried ({clock})")
    ranked, spread = _uncertain(machine, ranking, replays, settings)
    clock.lap("uncertainty")
    say(f"{settings.n_samples} machines drawn ({clock})")
    return Advice(ranked, elasticities, spread, len(bounded), machine.n_unfit,
                  machine.n_simulated, clock.laps)  # fmt: skip


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._at = now - self._at, now

    def __str__(self) -> str:
        return f"{list(self.laps.values())[-1]:.1f} s"


def _rank(machine: Machine, bounded: list[Bounded], space: Space) -> tuple[Ranked, ...]:
    """The best of every policy, by value; the first enumerated of equals first.

    Of policies near the best, the most promising batch sizes between the powers of two and then
    other slices are tried as well, and their candidates appended to ``bounded``. Policies that take
    long to place a job come last and have a few tries only, one of them the setting that is best
    for a corner of theirs.
    """
    slow = [name for name, policy in space.policies.items() if places_slowly(policy)]
    own: dict[str, list[Bounded]] = {name: [] for name in space.policies}
    for item in bounded:
        own[item.candidate.name].append(item)
    found = {name: best_first(machine, own[name]) for name in own if name not in slow}
    least = FINER_NEAR * max((t.value or 0.0 for t in found.values() if t), default=0.0)
    for name, tried in found.items():
        if tried is not None and (tried.value or 0.0) >= least:
            finer = machine.refine(space, tried)
            best = best_first(machine, finer, (tried,), FINER_TRIES) or tried
            sliced = machine.all_of(space.sliced(best.candidate))
            found[name] = best_first(machine, sliced, (best,))
            bounded += finer + sliced
    for name in slow:
        alike = machine.all_of(_like_a_corner(space, name, found.values()))
        known = best_first(machine, alike)
        chosen = best_first(machine, own[name], (known,) if known else (), SLOW_TRIES)
        if chosen is not None and (chosen.value or 0.0) >= least:
            finer = machine.refine(space, chosen)
            chosen = best_first(machine, finer, (chosen,), SLOW_FINER_TRIES)
            bounded += finer
        found[name] = chosen
    order = {name: i for i, name in enumerate(space.policies)}
    ranked = [Ranked(t, t.value) for t in found.values() if t is not None and t.value is not None]
    return tuple(sorted(ranked, key=lambda r: (-r.value, order[r.tried.candidate.name])))


def _like_a_corner(space: Space, name: str, found: Iterable[Tried | None]) -> list[Candidate]:
    """``mixed`` as the best of its corners is placed and sized."""
    corners = (TightLLM, Kvpr, HybridServe, FlexGen)
    values = [t for t in found if t is not None and isinstance(t.candidate.policy, corners)]
    best_first_of = sorted(values, key=lambda tried: -(tried.value or 0.0))
    made = (space.like(name, tried.candidate) for tried in best_first_of)
    return [candidate for candidate in made if candidate is not None][:1]


def _why_not(machine: Machine, bounded: list[Bounded]) -> str:
    if not bounded:
        near = f"; nearest is {machine.nearest}" if machine.nearest is not None else ""
        return f"no candidate fits into memory{near}"
    if machine.objective.max_tpot_s is not None:
        return (
            f"no candidate reaches advise.max_tpot_s {machine.objective.max_tpot_s:g} s per token"
        )
    return f"the workload has no work that counts in {machine.objective.name}"


# ---- machines as they may be ---------------------------------------------------------------------


def _uncertain(
    machine: Machine,
    ranking: tuple[Ranked, ...],
    replays: Sequence[Replay],
    settings: AdviseSettings,
) -> tuple[tuple[Ranked, ...], dict[str, float]]:
    """Deciles of every ranked value, and which numbers the best's spread comes from.

    All candidates meet the same machines; their plans are those made for the profile.
    """
    if not settings.n_samples:
        return ranking, {}
    deviations = sigmas(machine.hardware, settings.sigma)
    rng = np.random.default_rng(machine.base.seed)
    drawn = [draw(machine.hardware, deviations, rng) for _ in range(settings.n_samples)]
    values = np.zeros((len(ranking), len(drawn)))
    counts = np.zeros(values.shape, bool)
    for j, factors in enumerate(drawn):
        hardware = with_factors(machine.hardware, factors)
        for i, replay in enumerate(replays):
            times = replay.on(hardware)
            values[i, j] = machine.objective.score(replay.job, times) or 0.0
            counts[i, j] = machine.objective.allows(times)
    best = np.where(counts, values, -1.0)
    wins = (best == best.max(axis=0)) & counts
    deciles = np.quantile(values, QUANTILES, axis=1)
    ranked = tuple(
        replace(r, low=float(deciles[0, i]), median=float(deciles[1, i]),
                high=float(deciles[2, i]), wins=fmean(wins[i].tolist()))
        for i, r in enumerate(ranking)
    )  # fmt: skip
    return ranked, _spread(np.log(values[0]), drawn)


def _spread(logs: np.ndarray, drawn: list[dict[str, float]]) -> dict[str, float]:
    """Share of the variance of ``logs`` that each number explains alone: squared correlations."""
    shares: dict[str, float] = {}
    if logs.std() == 0:
        return shares
    for name in drawn[0]:
        factors = np.log([factors[name] for factors in drawn])
        if factors.std() > 0:
            shares[name] = float(np.corrcoef(factors, logs)[0, 1] ** 2)
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
