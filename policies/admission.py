"""Admission: which waiting requests enter the next iteration of continuous batching.

A request costs its new tokens T of the iteration's token budget, but K + T tokens of GPU memory
for as long as it runs. ``Fifo`` looks at the head of the queue only, so one large cached prefix
that does not fit idles the budget; the others look past it. What readers get wrong: looking past
the head starves it unless something counts. Here every waiting request knows how many later ones
overtook it, and ``Rules.max_overtaken`` is a hard bound on that number, whatever the policy
prefers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from policies import knapsack
from policies.spec.request import Request


@dataclass(slots=True)
class Waiting:
    """A request in the queue; ``overtaken`` counts requests behind it that were admitted first."""

    request: Request
    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """What a policy may know beside the queue; every count is in tokens unless it says otherwise.

    ``free_tokens`` of ``capacity_tokens`` of GPU memory are free, ``budget_tokens`` new tokens are
    left in this iteration, ``free_seqs`` more requests may run, ``running`` are those that do.
    """

    now_s: float
    free_tokens: int
    budget_tokens: int
    free_seqs: int
    capacity_tokens: int
    running: Collection[Request]


class Admission(Protocol):
    """Picks queue positions to admit, in order of admission.

    All of K + T must fit in memory together. The budget may be exceeded by the last one only: it
    is prefilled in chunks.
    """

    @property
    def name(self) -> str:
        """Name in results."""
        ...

    def choose(self, queue: Sequence[Waiting], view: AdmissionView) -> tuple[int, ...]:
        """Positions in ``queue``, which is in order of arrival."""
        ...


class Room(NamedTuple):
    """What is left of memory, budget and places while an iteration is filled."""

    free: int
    budget: int
    seqs: int

    def fits(self, request: Request) -> bool:
        """Whether a request may be admitted; it may exceed the budget, not start without any."""
        return self.budget > 0 and self.seqs > 0 and request.n_tokens <= self.free

    def less(self, request: Request) -> Room:
        """After admitting it."""
        return Room(self.free - request.n_tokens, self.budget - request.n_prefill, self.seqs - 1)


Pick = Callable[[list[int], Room], list[int]]
_ROUNDS = 4  # of picking again; more change little, and ``bounded`` has the last word


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits that hold whatever a policy prefers.

    No request is overtaken by more than ``max_overtaken`` later ones: when it has been, nobody
    behind it is admitted before it. At most ``max_high_kappa`` requests with
    K / T > ``high_kappa`` run at once (None: any number).
    """

    max_overtaken: int = 4096
    high_kappa: float = 100.0
    max_high_kappa: int | None = None

    def __post_init__(self) -> None:
        if self.max_overtaken < 0:
            raise ValueError(f"admission.max_overtaken: {self.max_overtaken} must be >= 0")
        if not self.high_kappa >= 0:
            raise ValueError(f"admission.high_kappa: {self.high_kappa} must be >= 0")
        if self.max_high_kappa is not None and self.max_high_kappa < 1:
            raise ValueError(
                f"admission.max_high_kappa: {self.max_high_kappa} must be >= 1 or null"
            )

    def eligible(self, queue: Sequence[Waiting], view: AdmissionView) -> list[int]:
        """Positions that fit in memory by themselves and that the cap lets in, earliest first."""
        free, cap = view.free_tokens, self.max_high_kappa
        fits = [i for i, w in enumerate(queue) if w.request.n_tokens <= free]
        if cap is None:
            return fits
        left = cap - sum(r.kappa_ratio > self.high_kappa for r in view.running)
        allowed = []
        for i in fits:
            if queue[i].request.kappa_ratio > self.high_kappa:
                if left <= 0:
                    continue
                left -= 1
            allowed.append(i)
        return allowed

    def settle(self, queue: Sequence[Waiting], view: AdmissionView, pick: Pick) -> tuple[int, ...]:
        """What ``pick`` chooses, with those first whom it would overtake too often.

        Everyone whose allowance a choice would exceed goes first, in order of arrival, and the rest
        is picked again; if one of them does not fit, only those ahead of it are candidates.
        """
        eligible = self.eligible(queue, view)
        due = {i for i, w in enumerate(queue) if w.overtaken >= self.max_overtaken}
        chosen: list[int] = []
        for _ in range(_ROUNDS):
            room = Room(view.free_tokens, view.budget_tokens, view.free_seqs)
            allowed, first = set(eligible), []
            for i in sorted(due):
                if i not in allowed or not room.fits(queue[i].request):
                    allowed = {j for j in allowed if j < i}
                    break
                first.append(i)
                allowed.discard(i)
                room = room.less(queue[i].request)
            rest = [i for i in eligible if i in allowed]
            chosen = sorted([*first, *pick(rest, room)])
            late = self._late(queue, chosen)
            if not late:
                return tuple(chosen)
            due |= late
        return self.bounded(queue, chosen)

    def _late(self, queue: Sequence[Waiting], chosen: Sequence[int]) -> set[int]:
        """Positions that ``chosen`` (increasing) would overtake beyond the bound."""
        taken, behind, late = set(chosen), len(chosen), set()
        for position in range(chosen[-1] if chosen else 0):
            if position in taken:
                behind -= 1
            elif queue[position].overtaken + behind > self.max_overtaken:
                late.add(position)
        return late

    def bounded(self, queue: Sequence[Waiting], chosen: Sequence[int]) -> tuple[int, ...]:
        """The earliest of ``chosen`` (increasing) that overtake nobody beyond the bound."""
        kept, at = [], 0
        left = math.inf  # nobody has been passed yet
        for position in chosen:
            for passed in range(at, position):
                left = min(left, self.max_overtaken - queue[passed].overtaken)
            if left > 0:
                kept.append(position)
                left -= 1
            else:
                left = min(left, self.max_overtaken - queue[position].overtaken)
            at = position + 1
        return tuple(kept)


@dataclass(frozen=True, slots=True)
class Fifo:
    """In order of arrival, new tokens charged against the budget, as vLLM does (papers.md 1.2).

    Stops at the first request whose K + T does not fit.
    """

    name: str = "fifo"

    def choose(self, queue: Sequence[Waiting], view: AdmissionView) -> tuple[int, ...]:
        """The longest run from the head that fits."""
        room, n = Room(view.free_tokens, view.budget_tokens, view.free_seqs), 0
        for waiting in queue:
            if not room.fits(waiting.request):
                break
            room = room.less(waiting.request)
            n += 1
        return tuple(range(n))


@dataclass(frozen=True, slots=True)
class VramAware:
    """In order of arrival, charging K + T of memory: what does not fit is passed over."""

    rules: Rules = field(default_factory=Rules)
    name: str = "vram-aware"

    def choose(self, queue: Sequence[Waiting], view: AdmissionView) -> tuple[int, ...]:
        """First fit."""
        return self.rules.settle(queue, view, lambda rest, room: _fill(queue, rest, room))


@dataclass(frozen=True, slots=True)
class UtilisationAware:
    """The set that schedules most new tokens under memory and budget (papers.md 1.2).

    Where first fit in order of arrival fills the budget, no set schedules more, and that one is
    taken. Else a request's value is its new tokens (at most the budget) plus ``aging_per_s`` for
    every second that it has waited longer than the latest arrival in view and every token of
    memory that it needs: its priority, value per memory, is ``T / (K + T)`` and grows linearly with
    waiting, so whoever has waited ``1 / aging_per_s`` seconds longer outranks any other. Waiting
    that all share cancels. Filling all memory is worth the share ``memory_weight`` of the budget:
    with nothing for it, a budget that few small requests fill leaves memory empty which large
    prefixes need sooner or later. ``exact`` solves the knapsack, else the greedy set is taken.
    Overdue requests come first, in order of arrival. Budget that whole requests leave is given to
    the first that fits, in chunks.
    """

    rules: Rules = field(default_factory=Rules)
    exact: bool = False
    aging_per_s: float = 0.1
    memory_weight: float = 0.1
    name: str = "utilisation-aware"

    def __post_init__(self) -> None:
        for name in ("aging_per_s", "memory_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"admission.{name}: {getattr(self, name)} must be >= 0")

    def choose(self, queue: Sequence[Waiting], view: AdmissionView) -> tuple[int, ...]:
        """Overdue requests, then the knapsack, then one request in part."""
        return self.rules.settle(queue, view, lambda rest, room: self._packed(queue, rest, room))

    def _packed(self, queue: Sequence[Waiting], positions: Sequence[int], room: Room) -> list[int]:
        """Positions of the most valuable set, and of one more request in part if budget is left."""
        if room.budget <= 0 or room.seqs <= 0 or not positions:
            return []
        first = _fill(queue, positions, room)
        if sum(queue[i].request.n_prefill for i in first) >= room.budget:
            return first
        requests = [queue[i].request for i in positions]
        tokens = [min(r.n_prefill, room.budget) for r in requests]
        memory = [r.n_tokens for r in requests]
        age, fill = self.aging_per_s, self.memory_weight * room.budget / max(1, room.free)
        values: Sequence[float] = tokens
        if age or fill:
            latest_s = max(r.arrival_s for r in requests)
            values = [
                t + (fill + age * (latest_s - r.arrival_s)) * n
                for t, r, n in zip(tokens, requests, memory, strict=True)
            ]
        solve = knapsack.exact if self.exact else knapsack.greedy
        picked = solve(values, memory, tokens, room.free, room.budget)[: room.seqs]
        chosen = [positions[i] for i in picked]
        left = Room(
            room.free - sum(memory[i] for i in picked),
            room.budget - sum(tokens[i] for i in picked),
            min(1, room.seqs - len(chosen)),
        )
        taken = set(chosen)
        return chosen + _fill(queue, [i for i in positions if i not in taken], left)


@dataclass(frozen=True, slots=True)
class FairShare:
    """Memory shared by weight: the group that holds least for its weight admits next.

    ``weights[g]`` is the weight of ``Request.group`` g. Within a group the order is that of
    arrival; a group whose first request does not fit waits and does not hold up the others.
    """

    weights: tuple[float, ...] = (1.0,)
    rules: Rules = field(default_factory=Rules)
    name: str = "fair-share"

    def __post_init__(self) -> None:
        # Hydra hands over a list; a tuple keeps the policy hashable and frozen.
        object.__setattr__(self, "weights", tuple(self.weights))
        if not self.weights or any(not w > 0 for w in self.weights):
            raise ValueError(f"admission.weights: {self.weights} must be one or more numbers > 0")

    def choose(self, queue: Sequence[Waiting], view: AdmissionView) -> tuple[int, ...]:
        """Repeatedly the first request of the group with the least memory held per weight."""
        held = [0.0] * len(self.weights)
        for request in view.running:
            held[self._group(request)] += request.n_tokens
        return self.rules.settle(
            queue, view, lambda rest, room: self._shared(queue, rest, list(held), room)
        )

    def _shared(
        self, queue: Sequence[Waiting], positions: Sequence[int], held: list[float], room: Room
    ) -> list[int]:
        first: list[list[int]] = [[] for _ in self.weights]
        for i in reversed(positions):
            first[self._group(queue[i].request)].append(i)
        chosen = []
        groups = [g for g, waiting in enumerate(first) if waiting]
        while groups:
            group = min(groups, key=lambda g: held[g] / self.weights[g])
            request = queue[first[group][-1]].request
            if not room.fits(request):
                groups.remove(group)
                continue
            chosen.append(first[group].pop())
            held[group] += request.n_tokens
            room = room.less(request)
            if not first[group]:
                groups.remove(group)
        return chosen

    def _group(self, request: Request) -> int:
        if request.group >= len(self.weights):
            raise ValueError(
                f"group: {request.group} of request {request.index} has no weight, "
                f"admission.weights has {len(self.weights)}"
            )
        return request.group


def _fill(queue: Sequence[Waiting], order: Sequence[int], room: Room) -> list[int]:
    """First fit in ``order``; the last one may exceed the budget."""
    chosen = []
    for i in order:
        if room.budget <= 0 or room.seqs <= 0:
            break
        request = queue[i].request
        if room.fits(request):
            chosen.append(i)
            room = room.less(request)
    return chosen
