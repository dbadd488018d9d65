"""Best-first search among candidates: simulate the most promising until no other can be better.

Every candidate gets an upper bound on its value (``policies.cost.bound``), which is cheap; those
whose bound does not reach the best simulated value are never simulated. So the best found is the
best there is. What readers get wrong: that holds for the candidates that were enumerated, not for
all ways to run the workload, and for ``mixed``, which takes seconds to place a job and so has a few
tries only, it need not hold.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from policies.cost.bound import RunBound, run_bound
from policies.cost.mixed_bound import mixed_bound, possible_placements
from policies.cost.model import CostModel
from policies.drive import Policy
from policies.errors import OutOfMemory
from policies.mixed import Mixed
from policies.placement import Placement
from policies.plan.memory import check_run
from policies.spec.hardware import HardwareProfile
from policies.spec.workload import Block
from sim.candidates import Candidate, Space
from sim.job import make_job
from sim.pack import Job
from sim.program_cache import ProgramCache
from sim.result import RunRecord
from sim.run import RunSpec, simulate

OBJECTIVES = ("decode_tokens_per_s", "prefill_tokens_per_s", "requests_per_s")
# A bound prices all decode steps as the middle one, which a curve that bends the wrong way between
# two measured points may exceed by a little.
SLACK = 0.005


class Phases(Protocol):
    """Seconds of a job: those of a record, of a bound or of a replay."""

    @property
    def prefill_s(self) -> float | None: ...  # noqa: D102
    @property
    def decode_s(self) -> float | None: ...  # noqa: D102
    @property
    def makespan_s(self) -> float | None: ...  # noqa: D102
    @property
    def tpot_s(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Objective:
    """What is best: the largest ``name`` among runs whose mean TPOT is at most ``max_tpot_s``.

    ``requests_per_s`` is requests over the makespan of the whole job, prefill included.
    """

    name: str = OBJECTIVES[0]
    max_tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise ValueError(f"advise.objective: {self.name!r} is none of {', '.join(OBJECTIVES)}")
        if self.max_tpot_s is not None and not self.max_tpot_s > 0:
            raise ValueError(f"advise.max_tpot_s: {self.max_tpot_s} must be > 0 or null")

    def score(self, job: Job, times: Phases) -> float | None:
        """Value of a run of ``job`` that takes ``times``; None where it has nothing to count."""
        work, seconds = {
            "decode_tokens_per_s": (job.decode_tokens, times.decode_s),
            "prefill_tokens_per_s": (job.prompt_tokens, times.prefill_s),
            "requests_per_s": (job.n_requests, times.makespan_s),
        }[self.name]
        if not work or seconds is None:
            return None
        return work / seconds if seconds > 0 else math.inf

    def allows(self, times: Phases, slack: float = 0.0) -> bool:
        """Whether the latency bound holds."""
        return self.max_tpot_s is None or (times.tpot_s or 0.0) <= self.max_tpot_s * (1 + slack)

    def upper(self, bound: RunBound, job: Job) -> float:
        """Value that no run with this bound exceeds; 0 where it cannot count."""
        value = self.score(job, bound) if self.allows(bound, SLACK) else None
        return 0.0 if value is None else (1 + SLACK) * value


class Bounded(NamedTuple):
    """A candidate and the value that it cannot exceed."""

    candidate: Candidate
    upper: float


class Tried(NamedTuple):
    """A candidate that was simulated; ``value`` None where the run does not count."""

    candidate: Candidate
    record: RunRecord
    value: float | None


class Unfit(NamedTuple):
    """A candidate that does not fit, and what it lacks."""

    candidate: Candidate
    error: OutOfMemory

    def __str__(self) -> str:
        """Which candidate, and the error, which names the largest pool."""
        return f"{' '.join(self.candidate.overrides)}: {self.error}"

    def lacks(self) -> float:
        """Bytes needed over bytes there."""
        return self.error.need_bytes / max(1, self.error.have_bytes)


@dataclass(slots=True)
class Machine:
    """Candidates on one machine: bounded and simulated, each at most once."""

    base: RunSpec
    hardware: HardwareProfile
    objective: Objective
    jobs: dict[tuple[int, int], Job] = field(default_factory=dict)  # shared between machines
    known: ProgramCache = field(default_factory=ProgramCache)
    _tried: dict[Candidate, Tried] = field(default_factory=dict)
    _placed: dict[Candidate, Placement] = field(default_factory=dict)
    n_unfit: int = 0
    nearest: Unfit | None = None  # of those that do not fit, what lacks least

    @property
    def n_simulated(self) -> int:
        """Simulations so far."""
        return len(self._tried)

    def job(self, candidate: Candidate) -> Job:
        """The job of a candidate: its requests, packed. ``Infeasible`` where none is left."""
        key = candidate.batch_size, candidate.n_batches
        if key not in self.jobs:
            spec = candidate.spec(self.base, self.hardware)
            self.jobs[key] = make_job(
                spec.workload, spec.model, spec.hardware, spec.policy, spec.seed
            )
        return self.jobs[key]

    def spec(self, candidate: Candidate) -> RunSpec:
        """The candidate's run, as it is simulated."""
        return cheaply(candidate.spec(self.base, self.hardware))

    def placed(self, candidate: Candidate) -> Placement:
        """Where the candidate's job lies, whether it fits or not."""
        if candidate not in self._placed:
            policy = self.spec(candidate).policy
            blocks = policy.blocks(self.job(candidate).blocks)
            self._placed[candidate] = policy.place(self.base.model, self.hardware, blocks)
        return self._placed[candidate]

    def upper(self, candidate: Candidate) -> float | None:
        """Bound on the candidate's value; None where it does not fit."""
        model, hardware, policy = self.base.model, self.hardware, candidate.policy
        job = self.job(candidate)
        blocks = policy.blocks(job.blocks)
        places: Iterable[Placement]
        if places_slowly(policy):
            places = possible_placements(policy, model, hardware, blocks)
        else:
            places = (self.placed(candidate),)
        if not self._fits(candidate, places, blocks):
            self.n_unfit += 1
            return None
        if isinstance(policy, Mixed):
            return self.objective.upper(mixed_bound(policy, model, hardware, blocks), job)
        costs = CostModel(model, hardware, self.placed(candidate))
        return self.objective.upper(run_bound(policy, costs, blocks), job)

    def _fits(
        self, candidate: Candidate, places: Iterable[Placement], blocks: Sequence[Block]
    ) -> bool:
        """Whether the candidate runs in one of ``places``; if not, ``nearest`` may be it."""
        lacking = []
        for placement in places:
            try:
                buffers = candidate.policy.buffers
                check_run(self.base.model, self.hardware, placement, buffers, blocks)
            except OutOfMemory as error:
                lacking.append(Unfit(candidate, error))
            else:
                return True
        known = [] if self.nearest is None else [self.nearest]
        self.nearest = min([*known, *lacking], key=Unfit.lacks, default=None)
        return False

    def tried(self, candidate: Candidate) -> Tried:
        """The candidate's run."""
        if candidate not in self._tried:
            job, placement = self.job(candidate), self.placed(candidate)
            run = simulate(self.spec(candidate), known=self.known, job=job, placement=placement)
            record = run.record
            counts = record.status == "ok" and self.objective.allows(record)
            value = self.objective.score(job, record) if counts else None
            self._tried[candidate] = Tried(candidate, record, value)
        return self._tried[candidate]

    def all_of(self, candidates: Iterable[Candidate]) -> list[Bounded]:
        """Those that fit, with their bounds."""
        found = ((candidate, self.upper(candidate)) for candidate in candidates)
        return [Bounded(candidate, upper) for candidate, upper in found if upper is not None]

    def enumerate(self, space: Space, settled: Collection[Candidate] = ()) -> list[Bounded]:
        """All candidates of ``space`` that fit, with their bounds; simplest settings first.

        Larger batches than the first that does not fit are not looked at, nor than the job has
        requests. ``settled`` ones fit and are left out.
        """
        found: list[Bounded] = []
        for name in space.policies:
            for n_batches in space.n_batches:
                for variant in space.by_size(name, n_batches):
                    found += self._while_they_fit(variant, settled)
            blocks = self._longest(space, name)
            for candidate in space.flexgen(name, self.hardware, self.base, blocks):
                found += self._while_they_fit([candidate], settled)
        return found

    def refine(self, space: Space, best: Tried) -> list[Bounded]:
        """Candidates of the best one's policy whose blocks are about as large as its own."""
        found: list[Bounded] = []
        name, n_seqs = best.candidate.name, best.candidate.batch_size * best.candidate.n_batches
        for n_batches in space.n_batches:
            sizes = space.near(n_seqs, n_batches)
            for variant in space.by_size(name, n_batches, sizes) if sizes else ():
                found += self._while_they_fit(variant)
        return found

    def _while_they_fit(
        self, growing: Sequence[Candidate], settled: Collection[Candidate] = ()
    ) -> Iterable[Bounded]:
        for candidate in growing:
            if candidate not in settled:
                upper = self.upper(candidate)
                if upper is None:
                    return
                yield Bounded(candidate, upper)
            if self.base.workload.source != "fixed":
                job = self.job(candidate)
                if candidate.batch_size * candidate.n_batches >= job.n_requests:
                    return

    def _longest(self, space: Space, name: str) -> dict[int, Block]:
        """By batch size the block with most tokens a sequence, whatever the number of batches."""
        found: dict[int, Block] = {}
        for size in space.sizes:
            candidate = Candidate(name, space.policies[name], size, 1, ())
            job = self.job(candidate)
            found[size] = max(job.blocks, key=lambda block: block.max_tokens)
            if self.base.workload.source != "fixed" and size >= job.n_requests:
                break
        return found


def best_first(
    machine: Machine,
    bounded: Iterable[Bounded],
    known: Iterable[Tried] = (),
    limit: int | None = None,
) -> Tried | None:
    """The candidate with the largest value, the first of equals; None where none counts.

    ``known`` are runs to start from. Ties in the bound are tried in the order given. With
    ``limit`` no more than that many are simulated, and the best of them need not be the best.
    """
    best: Tried | None = None
    for tried in known:
        best = _better(best, tried)
    promising = sorted(bounded, key=lambda item: -item.upper)
    for candidate, upper in promising[:limit]:
        if upper <= 0 or (best is not None and best.value is not None and upper <= best.value):
            break
        best = _better(best, machine.tried(candidate))
    return best


def places_slowly(policy: Policy) -> bool:
    """Whether a policy takes up to seconds to place a job: ``mixed`` tries plans for that."""
    return isinstance(policy, Mixed)


def _better(best: Tried | None, tried: Tried) -> Tried | None:
    if tried.value is None:
        return best
    if best is None or best.value is None or tried.value > best.value:
        return tried
    return best


def cheaply(spec: RunSpec) -> RunSpec:
    """The same run, decided by the dynamic program alone: all solvers decide alike (law L14)."""
    policy: Any = spec.policy
    if getattr(policy, "solver", None) != "auto":
        return spec
    return replace(spec, policy=replace(policy, solver="dp"))
