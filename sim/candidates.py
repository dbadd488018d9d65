"""Candidates of an advice: ways to run a workload, each written as the overrides that choose it.

Policies times batch sizes (powers of two that fit) times numbers of batches times placements; other
slices of the weights are tried on what is best without them. FlexGen's own placements come from its
linear program, one for every size and number of batches, and one for the sizes that its search
would take itself. What readers get wrong: a candidate is a setting, not a time; whether it runs at
all is found out when it is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from policies.cost.flexgen_model import FlexGenJob
from policies.drive import Policy
from policies.flexgen import FlexGen
from policies.flexgen_search import BATCH_SIZES, PlacementSearch
from policies.spec.hardware import HardwareProfile
from policies.spec.workload import Block
from sim.run import RunSpec

HOST, AUTO, FLEXGEN = PLACEMENTS = ("host", "auto", "flexgen")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy and the sizes of its batches; ``overrides`` choose exactly that."""

    name: str
    policy: Policy
    batch_size: int
    n_batches: int
    overrides: tuple[str, ...]

    def spec(self, base: RunSpec, hardware: HardwareProfile) -> RunSpec:
        """The run of this candidate on ``hardware``, without a trace."""
        workload = replace(base.workload, batch_size=self.batch_size, n_batches=self.n_batches)
        return replace(base, hardware=hardware, policy=self.policy, workload=workload, trace="none")


@dataclass(frozen=True, slots=True)
class Space:
    """What is enumerated.

    All candidates have the first of ``slices_per_batch``, the others are variants of one candidate;
    None is the policy's own choice of slices.
    """

    policies: Mapping[str, Policy]
    n_batches: Sequence[int] = (1, 2, 4, 8, 16)
    max_batch_size: int = 1024
    placements: Sequence[str] = PLACEMENTS
    slices_per_batch: Sequence[int | None] = (None, 1, 16)

    def __post_init__(self) -> None:
        if not self.policies:
            raise ValueError("advise.policies: is empty, must name at least one policy")
        if not self.n_batches or min(self.n_batches) < 1:
            raise ValueError(f"advise.n_batches: {list(self.n_batches)} must be numbers >= 1")
        if self.max_batch_size < 1:
            raise ValueError(f"advise.max_batch_size: {self.max_batch_size} must be >= 1")
        for name in self.placements:
            if name not in PLACEMENTS:
                raise ValueError(f"advise.placements: {name!r} is none of {', '.join(PLACEMENTS)}")
        if not self.placements:
            raise ValueError("advise.placements: is empty, must name at least one placement")
        for n in self.slices_per_batch:
            if n is not None and n < 1:
                raise ValueError(f"advise.slices_per_batch: {n} must be >= 1 or null")
        if not self.slices_per_batch:
            raise ValueError("advise.slices_per_batch: is empty, must hold at least one value")

    @property
    def sizes(self) -> list[int]:
        """Batch sizes: powers of two."""
        return [2**i for i in range(self.max_batch_size.bit_length())]

    def settings(self, policy: Policy, n_batches: int) -> Iterator[tuple[Policy, tuple[str, ...]]]:
        """Variants of a policy for a number of batches, simplest first; not FlexGen's program."""
        own = [p for p in self.placements if p != FLEXGEN and _knows(policy, p)]
        places: Sequence[str | None] = own if _has(policy, "placement") else [None]
        n = self.slices_per_batch[0] if _slices(policy) else None
        for place in places:
            changes: dict[str, Any] = {}
            if place is not None:
                changes["placement"] = place
            if n is not None:
                changes["n_slices"] = n * n_batches
            texts = tuple(f"policy.{key}={value}" for key, value in changes.items())
            yield replace(policy, **changes), texts  # type: ignore[type-var]

    def sliced(self, candidate: Candidate) -> list[Candidate]:
        """The same with the other numbers of slices; none for a policy that has no choice."""
        policy = candidate.policy
        if not _slices(policy):
            return []
        kept = [t for t in candidate.overrides if not t.startswith("policy.n_slices=")]
        own = [text for text in kept if text.startswith("policy")]
        found = []
        for n in self.slices_per_batch[1:]:
            total = None if n is None else n * candidate.n_batches
            texts = (*own, *([f"policy.n_slices={total}"] if total else []), *kept[len(own) :])
            changed = replace(policy, n_slices=total)  # type: ignore[type-var]
            found.append(replace(candidate, policy=changed, overrides=texts))
        return found

    def like(self, name: str, other: Candidate) -> Candidate | None:
        """A policy with another's placement and sizes; None where that has percentages."""
        place = getattr(other.policy, "placement", None)
        if place is None or getattr(other.policy, "percent", None) is not None:
            return None
        if not _knows(self.policies[name], place):
            return None
        policy = replace(self.policies[name], placement=place)  # type: ignore[type-var]
        texts = (f"policy.placement={place}",)
        return _candidate(name, policy, other.batch_size, other.n_batches, texts)

    def by_size(
        self, name: str, n_batches: int, sizes: Sequence[int] = ()
    ) -> Iterator[list[Candidate]]:
        """Candidates of one variant of a policy, sizes growing; by default ``self.sizes``."""
        for policy, texts in self.settings(self.policies[name], n_batches):
            yield [_candidate(name, policy, size, n_batches, texts) for size in sizes or self.sizes]

    def near(self, n_seqs: int, n_batches: int) -> list[int]:
        """Batch sizes between the powers of two that make blocks of about ``n_seqs`` sequences.

        Eighths of the block from half of it on, quarters up to twice.
        """
        eighths = (4, 5, 6, 7, 8, 10, 12, 14, 16)
        sizes = {n_seqs * k // (8 * n_batches) for k in eighths}
        return sorted(n for n in sizes - set(self.sizes) if 1 <= n <= self.max_batch_size)

    def flexgen(
        self, name: str, hardware: HardwareProfile, base: RunSpec, blocks: Mapping[int, Block]
    ) -> Iterator[Candidate]:
        """FlexGen's placements: for every size and number of batches, and for its own sizes.

        Its own are any of ``BATCH_SIZES`` and any number of batches, up to the largest allowed.
        ``blocks`` holds, by batch size, the longest block of the job.
        """
        policy = self.policies[name]
        if FLEXGEN not in self.placements or not isinstance(policy, FlexGen):
            return
        search = PlacementSearch(hardware, base.model, policy)

        def candidate(found: Any) -> Candidate:
            text = "[" + ",".join(f"{p:g}" for p in found.percent) + "]"
            placed = replace(policy, percent=found.percent, placement=HOST)
            job = found.job
            texts = (f"policy.percent={text}",)
            return _candidate(name, placed, job.batch_size, job.n_batches, texts)

        yielded = set()
        for n_batches in self.n_batches:
            for size, block in blocks.items():
                prompt_len = max(batch.prompt_len for batch in block.batches)
                found = search.best(
                    FlexGenJob(base.model, prompt_len, block.max_new, size, n_batches)
                )
                if found is None:
                    break  # nor does a larger batch
                yielded.add((size, n_batches))
                yield candidate(found)
        if base.workload.source == "fixed":
            found = search.over_batches(
                base.workload.prompt_len,
                base.workload.gen_len,
                [size for size in BATCH_SIZES if size <= self.max_batch_size],
                max(self.n_batches),
            )
            if found and (found.job.batch_size, found.job.n_batches) not in yielded:
                yield candidate(found)


def _has(policy: Policy, name: str) -> bool:
    return any(field.name == name for field in fields(policy))  # type: ignore[arg-type]


def _knows(policy: Policy, placement: str) -> bool:
    """Whether a policy has this placement; KVPR's weights are on the host or all on the GPU."""
    if not _has(policy, "placement"):
        return False
    try:
        replace(policy, placement=placement)  # type: ignore[type-var]
    except ValueError:
        return False
    return True


def _slices(policy: Policy) -> bool:
    """Whether a policy has a number of slices to choose."""
    return _has(policy, "n_slices") and bool(getattr(policy, "loader", True))


def _candidate(
    name: str, policy: Policy, size: int, n_batches: int, texts: tuple[str, ...]
) -> Candidate:
    sizes = (f"workload.batch_size={size}", f"workload.n_batches={n_batches}")
    return Candidate(name, policy, size, n_batches, (f"policy={name}", *texts, *sizes))
