"""The exact solver: integer slot times and a dynamic program over the cycle of batches.

Batch 0 is both the first and the last of a layer's slots, because its KV moves in the last one. A
plain pass from front to back forgets that and undercounts; here every state carries the candidate
that batch 0 started with. Ties are part of the result: the table holds every optimal decision, and
``decision`` takes the one that the tie-break of ``policies.ilp`` names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.slot_problem import SlotProblem

_FEW = 3  # candidates a batch for the upper bound
_PRICES = 6  # golden-section steps: 6 per cent of the range


@dataclass(frozen=True, slots=True)
class Quantised:
    """The program in integer units of ``quantum_s``; rows of a batch have its own length."""

    tokens: tuple[tuple[int, ...], ...]
    compute: tuple[npt.NDArray[np.int64], ...]
    links: tuple[tuple[npt.NDArray[np.int64], ...], ...]  # per link, per batch: KV of that batch
    per_slice: tuple[int, ...]  # per link
    n_slices: int

    @classmethod
    def of(cls, problem: SlotProblem) -> Quantised:
        """Round every tabulated time to the nearest unit; links that never move are left out."""
        unit_s = problem.quantum_s

        def rounded(table: tuple[tuple[float, ...], ...]) -> tuple[npt.NDArray[np.int64], ...]:
            return tuple(np.rint(np.array(row) / unit_s).astype(np.int64) for row in table)

        h2d, disk = rounded(problem.kv_h2d_s), rounded(problem.kv_disk_s)
        h2d_slice = disk_slice = 0
        if problem.n_slices:  # without slices their time may be any number of units
            h2d_slice = round(problem.slice_h2d_s / unit_s)
            disk_slice = round(problem.slice_disk_s / unit_s)
        if problem.serial_links:
            links = [(tuple(a + b for a, b in zip(h2d, disk, strict=True)), h2d_slice + disk_slice)]
        else:
            links = [(h2d, h2d_slice), (disk, disk_slice)]
        used = [(kv, one) for kv, one in links if one or any(row.any() for row in kv)]
        return cls(
            tokens=problem.candidates,
            compute=rounded(problem.compute_s),
            links=tuple(kv for kv, _ in used),
            per_slice=tuple(one for _, one in used),
            n_slices=problem.n_slices,
        )

    @property
    def n_batches(self) -> int:
        """Batches of the block."""
        return len(self.tokens)

    def transfer(self, batch: int) -> npt.NDArray[np.int64]:
        """Longest link time of slot ``batch``: [candidate of the next batch, slices carried]."""
        nxt = (batch + 1) % self.n_batches
        carried = np.arange(self.n_slices + 1, dtype=np.int64)
        longest = np.zeros((len(self.tokens[nxt]), carried.size), np.int64)
        for kv, one in zip(self.links, self.per_slice, strict=True):
            np.maximum(longest, kv[nxt][:, None] + one * carried, out=longest)
        return longest

    def value(self, indices: list[int], slices: list[int]) -> int:
        """Objective of a decision, in units."""
        n = self.n_batches
        return sum(
            max(
                int(self.compute[b][indices[b]]),
                int(self.transfer(b)[indices[(b + 1) % n], slices[b]]),
            )
            for b in range(n)
        )

    def keep(self, kept: list[npt.NDArray[np.intp]]) -> Quantised:
        """The program with only the candidates at positions ``kept[b]`` of each batch."""
        return replace(
            self,
            tokens=tuple(
                tuple(row[i] for i in rows) for row, rows in zip(self.tokens, kept, strict=True)
            ),
            compute=tuple(row[rows] for row, rows in zip(self.compute, kept, strict=True)),
            links=tuple(
                tuple(row[rows] for row, rows in zip(kv, kept, strict=True)) for kv in self.links
            ),
        )


def prune(exact: Quantised) -> Quantised:
    """The same program without candidates that no optimal decision uses.

    Pricing a slice at ``price`` units instead of counting slices leaves a shortest-cycle problem;
    its value through candidate i of batch b, plus ``price * n_slices``, is a lower bound of every
    decision that uses i. The best price is searched by golden section (the bound is concave in
    it). A decision among the best candidates of each batch gives the upper bound. What ties with
    it stays.
    """
    bounds = _best_bounds(exact)
    few = [np.sort(np.argsort(row, kind="stable")[:_FEW]) for row in bounds]
    reachable = Chain(exact.keep(few)).optimum
    return exact.keep([np.flatnonzero(row <= reachable) for row in bounds])


def _best_bounds(exact: Quantised) -> list[npt.NDArray[np.int64]]:
    transfer = [exact.transfer(b) for b in range(exact.n_batches)]
    low, high = 0, sum(exact.per_slice)
    best = _bounds(exact, transfer, low)

    def weigh(price: int) -> int:
        new = _bounds(exact, transfer, price)
        for row, other in zip(best, new, strict=True):
            np.maximum(row, other, out=row)  # each price bounds each candidate on its own
        return int(new[0].min())

    if exact.n_slices == 0 or high == 0:
        return best
    weigh(high)
    golden = (5**0.5 - 1) / 2
    left, right = round(high - golden * high), round(golden * high)
    at_left, at_right = weigh(left), weigh(right)
    for _ in range(_PRICES):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = round(low + golden * (high - low))
            at_right = weigh(right)
        else:
            high, right, at_right = right, left, at_left
            left = round(high - golden * (high - low))
            at_left = weigh(left)
    return best


def _bounds(
    exact: Quantised, transfer: list[npt.NDArray[np.int64]], price: int
) -> list[npt.NDArray[np.int64]]:
    """Per batch and candidate: least objective of a decision that uses it, slices priced."""
    n = exact.n_batches
    carried = price * np.arange(exact.n_slices + 1, dtype=np.int64)
    slots = [
        (np.maximum(own[:, None, None], links) - carried).min(axis=2)
        for own, links in zip(exact.compute, transfer, strict=True)
    ]  # [candidate, candidate of the next batch]
    from_first, to_first = [slots[0]], [slots[-1]]
    for b in range(1, n):
        from_first.append(_chained(from_first[-1], slots[b]))
        to_first.insert(0, _chained(slots[n - 1 - b], to_first[0]))
    cycles = [to_first[0].diagonal()]
    cycles += [(from_first[b - 1].T + to_first[b]).min(axis=1) for b in range(1, n)]
    return [row + price * exact.n_slices for row in cycles]


def _chained(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Least cost of two legs: the (min, +) product of two cost matrices."""
    shortest: npt.NDArray[np.int64] = (a[:, None, :] + b.T[None, :, :]).min(axis=2)
    return shortest


class Chain:
    """Least cost to go over the cycle of batches, ties included.

    ``to_go[b][i0, i, s]`` is the least key of slots b.. when batch 0 uses candidate i0, batch b
    candidate i, and s slices are left. A key packs (objective, recomputed tokens, sum b * z_b)
    into one integer, so that a plain minimum is lexicographic. A slot costs
    ``max(compute[i], transfer[j, z])``: with the pairs (j, z) sorted by transfer, those below
    ``compute[i]`` need a running minimum from the front and the others one from the back, and the
    work per slot is candidates^2 * slices^2 instead of candidates^3 * slices^2.
    """

    def __init__(self, exact: Quantised) -> None:
        self._exact = exact
        n, n_slices = exact.n_batches, exact.n_slices
        self._transfer = [exact.transfer(b) for b in range(n)]
        most_units = sum(
            max(int(own.max()), int(links.max()))
            for own, links in zip(exact.compute, self._transfer, strict=True)
        )
        most_tokens = sum(row[-1] for row in exact.tokens)
        self._token = (n - 1) * n_slices + 1  # one more than the largest sum b * z_b
        self._unit = self._token * (most_tokens + 1)
        self._never = self._unit * (most_units + 1)  # above any key
        # Past 62 bits numpy falls back to Python integers: slow, still exact.
        self._dtype: Any = np.int64 if self._never < 2**61 else object
        self._tokens = [np.array(row).astype(self._dtype) for row in exact.tokens]
        end = np.full((len(exact.tokens[0]),) * 2 + (n_slices + 1,), self._never, self._dtype)
        diagonal = np.arange(len(exact.tokens[0]))
        end[diagonal, diagonal, 0] = 0  # the cycle closes on i0, and no slice is left
        self._to_go = [end]
        for b in reversed(range(n)):
            self._to_go.insert(0, self._step(b, self._to_go[0]))
        self._start = self._to_go[0][diagonal, diagonal, n_slices]
        self._best = int(self._start.min())

    @property
    def optimum(self) -> int:
        """Least objective, in units."""
        return self._best // self._unit

    def _rest(self, batch: int, after: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Key of everything but slot ``batch``'s own time: [i0, slices left, j, z]."""
        n_slices = self._exact.n_slices
        left = np.arange(n_slices + 1)
        remaining = left[:, None] - left  # [slices left, z]
        rest = after[:, :, np.maximum(remaining, 0)] + batch * left.astype(self._dtype)
        rest[:, :, remaining < 0] = self._never
        return np.ascontiguousarray(rest.transpose(0, 2, 1, 3))

    def _step(self, batch: int, after: npt.NDArray[Any]) -> npt.NDArray[Any]:
        own = self._exact.compute[batch]
        transfer = self._transfer[batch].ravel()
        order = np.argsort(transfer, kind="stable")
        transfer = transfer[order]
        rest = self._rest(batch, after)
        rest = rest.reshape(*rest.shape[:2], -1)[:, :, order]
        hidden = np.minimum.accumulate(rest, axis=2)  # transfers that end before the compute
        rest += transfer.astype(self._dtype) * self._unit
        exposed = np.minimum.accumulate(rest[:, :, ::-1], axis=2)[:, :, ::-1]
        n_hidden = np.searchsorted(transfer, own, side="right")
        key = np.full((*rest.shape[:2], own.size), self._never, self._dtype)
        some = n_hidden > 0
        key[:, :, some] = (
            hidden[:, :, n_hidden[some] - 1] + own[some].astype(self._dtype) * self._unit
        )
        some = n_hidden < transfer.size
        key[:, :, some] = np.minimum(key[:, :, some], exposed[:, :, n_hidden[some]])
        key += self._tokens[batch] * self._token
        # Unreachable states would grow slot by slot: hold them at one value.
        return np.minimum(key, self._never).transpose(0, 2, 1)

    def decision(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Recomputed tokens and slices of the one optimal decision that the tie-break names."""
        exact = self._exact
        n, left, best = exact.n_batches, exact.n_slices, self._best
        total = best % self._unit // self._token  # recomputed tokens of every optimal decision

        def nearest(batch: int, options: npt.NDArray[np.intp]) -> int:
            tokens = exact.tokens[batch]
            return min((abs(n * tokens[i] - total), tokens[i], int(i)) for i in options)[2]

        first = nearest(0, np.flatnonzero(self._start == best))
        indices, slices = [first], []
        for b in range(n):
            i = indices[-1]
            slot = np.maximum(self._transfer[b], exact.compute[b][i]).astype(self._dtype)
            key = self._rest(b, self._to_go[b + 1][first : first + 1])[0, left] + slot * self._unit
            optimal = key + int(self._tokens[b][i]) * self._token == self._to_go[b][first, i, left]
            z = int(np.flatnonzero(optimal.any(axis=0)).max())
            slices.append(z)
            left -= z
            indices.append(nearest((b + 1) % n, np.flatnonzero(optimal[:, z])))
        return tuple(row[i] for row, i in zip(exact.tokens, indices, strict=False)), tuple(slices)
