"""The KV store below the GPU: host memory over disk, both LRU, in blocks of tokens.

A prefix is a list of segments (key, blocks): a conversation or a document is one segment that
grows, a Mooncake request one segment of one block per hash. Matching goes from the front and stops
at the first missing block. What readers get wrong: a chain is evicted from its tail, because a
block without those before it is worth nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Segments = Sequence[tuple[Hashable, int]]


class Match(NamedTuple):
    """Leading blocks found: the first ``n_host`` and then ``n_disk`` more; may interleave."""

    n_host: int
    n_disk: int

    @property
    def n_blocks(self) -> int:
        """Blocks found in all."""
        return self.n_host + self.n_disk


@dataclass(slots=True)
class StoreCounts:
    """Blocks that moved: demoted to disk, promoted from it, dropped for good."""

    n_demoted: int = 0
    n_promoted: int = 0
    n_dropped: int = 0


class PrefixStore:
    """Blocks by key; of one key the first ones are in host memory, the next ones on disk.

    ``host_blocks`` and ``disk_blocks`` are capacities, None for no limit.
    """

    def __init__(self, host_blocks: int | None, disk_blocks: int | None) -> None:
        for name, value in (("host_blocks", host_blocks), ("disk_blocks", disk_blocks)):
            if value is not None and value < 0:
                raise ValueError(f"{name}: {value} must be >= 0 or None")
        self._host: OrderedDict[Hashable, int] = OrderedDict()  # least recently used first
        self._disk: OrderedDict[Hashable, int] = OrderedDict()
        self._capacity = (host_blocks, disk_blocks)
        self.n_host = 0
        self.n_disk = 0
        self.counts = StoreCounts()

    def match(self, segments: Segments) -> Match:
        """Leading blocks that are here; changes nothing."""
        n_host = n_disk = 0
        for key, n_blocks in segments:
            host = min(self._host.get(key, 0), n_blocks)
            disk = min(self._disk.get(key, 0), n_blocks - host)
            n_host, n_disk = n_host + host, n_disk + disk
            if host + disk < n_blocks:
                break
        return Match(n_host, n_disk)

    def use(self, segments: Segments) -> Match:
        """Match, make what was found the most recently used, and bring it into host memory."""
        found = self.match(segments)
        left = found.n_blocks
        touched = []
        for key, n_blocks in segments:
            if left <= 0:
                break
            touched.append((key, min(n_blocks, left)))
            left -= n_blocks
        self._place(touched)
        return found

    def put(self, segments: Segments) -> None:
        """Hold these blocks, most recently used, as far as the capacity goes."""
        self._place(segments)

    def _place(self, segments: Segments) -> None:
        # The front of a prefix is touched last: it is the last to go.
        for key, n_blocks in reversed(segments):
            if n_blocks <= 0:
                continue
            have = self._host.get(key, 0)
            on_disk = self._disk.get(key, 0)
            if n_blocks > have:
                up = min(on_disk, n_blocks - have)
                if up:
                    self._set(self._disk, key, on_disk - up)
                    self.n_disk -= up
                    self.counts.n_promoted += up
                self._host[key] = n_blocks
                self.n_host += n_blocks - have
            self._host.move_to_end(key)
            if key in self._disk:
                self._disk.move_to_end(key)
        self._evict()

    def _evict(self) -> None:
        host, disk = self._capacity
        while host is not None and self.n_host > host:
            key, have = next(iter(self._host.items()))
            out = min(have, self.n_host - host)
            self._set(self._host, key, have - out)
            self.n_host -= out
            self._demote(key, out)
        while disk is not None and self.n_disk > disk:
            key, have = next(iter(self._disk.items()))
            out = min(have, self.n_disk - disk)
            self._set(self._disk, key, have - out)
            self.n_disk -= out
            self.counts.n_dropped += out

    def _demote(self, key: Hashable, n_blocks: int) -> None:
        """Append the evicted tail of a chain's host part to the front of its disk part."""
        if self._capacity[1] == 0:
            self.counts.n_dropped += n_blocks
            return
        self._disk[key] = self._disk.get(key, 0) + n_blocks
        self._disk.move_to_end(key)
        self.n_disk += n_blocks
        self.counts.n_demoted += n_blocks

    @staticmethod
    def _set(tier: OrderedDict[Hashable, int], key: Hashable, n_blocks: int) -> None:
        if n_blocks:
            tier[key] = n_blocks
        else:
            del tier[key]
