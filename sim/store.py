"""The KV store below the GPU: host memory over disk, both LRU, in blocks of tokens.

A prefix is a list of segments (key, blocks): a conversation or a document is one segment that
grows, a Mooncake request one segment of one block per hash. Matching goes from the front and stops
at the first missing block. What readers get wrong: a chain is evicted from its tail, because a
block without those before it is worth nothing; and a disk keeps only what it can write in time.
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


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Blocks per second that the disk writes and reads, one at a time.

    ``buffer_s`` seconds of writing wait in host memory; what is evicted beyond that is dropped.
    """

    write_blocks_per_s: float
    read_blocks_per_s: float
    buffer_s: float = 4.0

    def __post_init__(self) -> None:
        for name in ("write_blocks_per_s", "read_blocks_per_s", "buffer_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be > 0")


class PrefixStore:
    """Blocks by key; of one key the first ones are in host memory, the next ones on disk.

    ``host_blocks`` and ``disk_blocks`` are capacities, None for no limit. ``disk`` None: the disk
    writes in no time.
    """

    def __init__(
        self, host_blocks: int | None, disk_blocks: int | None, disk: DiskSpeed | None = None
    ) -> None:
        for name, value in (("host_blocks", host_blocks), ("disk_blocks", disk_blocks)):
            if value is not None and value < 0:
                raise ValueError(f"{name}: {value} must be >= 0 or None")
        self._host: OrderedDict[Hashable, int] = OrderedDict()  # least recently used first
        self._disk: OrderedDict[Hashable, int] = OrderedDict()
        self._capacity = (host_blocks, disk_blocks)
        self.n_host = 0
        self.n_disk = 0
        self.counts = StoreCounts()
        self._speed = disk
        self._now_s = 0.0
        self._credit = disk.write_blocks_per_s * disk.buffer_s if disk else 0.0  # blocks

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

    def use(self, segments: Segments, now_s: float) -> Match:
        """Match, make what was found the most recently used, and bring it into host memory."""
        self._pass_time(now_s)
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

    def put(self, segments: Segments, now_s: float) -> None:
        """Hold these blocks, most recently used, as far as the capacity goes."""
        self._pass_time(now_s)
        self._place(segments)

    def _pass_time(self, now_s: float) -> None:
        """The disk has written meanwhile, so more may be given to it."""
        if now_s < self._now_s:
            raise ValueError(f"now_s: {now_s} is before {self._now_s}")
        if self._speed is not None:
            rate = self._speed.write_blocks_per_s
            gained = self._credit + (now_s - self._now_s) * rate
            self._credit = min(gained, rate * self._speed.buffer_s)
        self._now_s = now_s

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
                    if self._speed is not None:  # the disk cannot write while it reads
                        speed = self._speed
                        self._credit -= up * speed.write_blocks_per_s / speed.read_blocks_per_s
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
        """Give the evicted tail of a chain's host part to the disk, as far as it can be written.

        What cannot be written breaks the chain, so what the disk holds behind it is dropped too.
        """
        written = 0 if self._capacity[1] == 0 else n_blocks
        if self._speed is not None:
            written = max(0, min(written, int(self._credit)))
            self._credit -= written
        behind = self._disk.pop(key, 0)
        kept = written + behind if written == n_blocks else written
        if kept:
            self._disk[key] = kept
        self.n_disk += kept - behind
        self.counts.n_demoted += written
        self.counts.n_dropped += n_blocks + behind - kept

    @staticmethod
    def _set(tier: OrderedDict[Hashable, int], key: Hashable, n_blocks: int) -> None:
        if n_blocks:
            tier[key] = n_blocks
        else:
            del tier[key]
