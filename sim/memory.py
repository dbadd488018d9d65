"""The memory ledger: which named pool holds how many bytes of which tier.

A pool is allocated whole and freed exactly once. What readers get wrong: ``peak_bytes`` is the
highest total ever held in a tier, which is not the sum of the pools' sizes if they do not live
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from policies.errors import OutOfMemory


class Pool(NamedTuple):
    """A named allocation that is held."""

    name: str
    tier: str
    nbytes: int


class Ledger:
    """Books of several tiers, ``capacities`` in bytes a tier.

    Every change asserts that no tier holds more than it has. With ``audit`` it also recounts all
    pools, which costs time in proportion to their number; turn it off for thousands of pools.
    """

    def __init__(self, capacities: Mapping[str, float], audit: bool = True) -> None:
        for tier, capacity in capacities.items():
            if not capacity >= 0:
                raise ValueError(f"capacities[{tier}]: {capacity} must be >= 0")
        self._capacities = {str(tier): capacity for tier, capacity in capacities.items()}
        self._audit = audit
        self._pools: dict[str, Pool] = {}
        self._held = dict.fromkeys(self._capacities, 0)
        self._peak = dict.fromkeys(self._capacities, 0)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Highest bytes ever held, by tier."""
        return dict(self._peak)

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes held now, by tier."""
        return dict(self._held)

    def pools(self) -> tuple[Pool, ...]:
        """The pools held now, oldest first."""
        return tuple(self._pools.values())

    def allocate(self, pool: str, tier: str, nbytes: int) -> None:
        """Hold ``nbytes`` of ``tier`` under the name ``pool``.

        ``OutOfMemory`` if the tier has not that much left; it names the largest pool of the tier,
        the one asked for included, and leaves the books as they were.
        """
        if tier not in self._capacities:
            raise ValueError(f"tier: {tier!r} is none of {', '.join(self._capacities)}")
        if pool in self._pools:
            raise ValueError(f"pool: {pool!r} is held already, free it first")
        if nbytes < 0 or nbytes != int(nbytes):
            raise ValueError(f"nbytes: {nbytes} of pool {pool!r} must be a whole number >= 0")
        asked = Pool(pool, str(tier), int(nbytes))
        need, have = self._held[tier] + asked.nbytes, self._capacities[tier]
        if need > have:
            here = [held for held in self._pools.values() if held.tier == tier]
            largest = max([*here, asked], key=lambda p: p.nbytes)
            raise OutOfMemory(str(tier), need, int(have), largest.name)
        self._pools[pool] = asked
        self._held[tier] = need
        self._peak[tier] = max(self._peak[tier], need)
        self._assert_books(tier)

    def free(self, pool: str) -> None:
        """Give a pool back; ``ValueError`` if no such pool is held, so also the second time."""
        held = self._pools.pop(pool, None)
        if held is None:
            raise ValueError(f"pool: {pool!r} is not held: never allocated, or freed already")
        self._held[held.tier] -= held.nbytes
        self._assert_books(held.tier)

    def _assert_books(self, tier: str) -> None:
        held, have, peak = self._held[tier], self._capacities[tier], self._peak[tier]
        if not 0 <= held <= peak <= have:
            raise AssertionError(f"ledger: {tier} holds {held} of {have} bytes, peak {peak}")
        if self._audit:
            counted = sum(pool.nbytes for pool in self._pools.values() if pool.tier == tier)
            if counted != held:
                raise AssertionError(f"ledger: {tier} holds {held} bytes, its pools {counted}")
