"""Disk: reads and writes past the page cache, in pieces, as the engine moves weights and KV.

What readers get wrong: without O_DIRECT one measures memory. Where a file system refuses O_DIRECT
(tmpfs, some overlays) reads drop the cache first and writes end in fdatasync; the point then says
``o_direct`` 0 and the profile repeats it. With it, memory counts all the same: a drive fills few
large pages sooner than many small ones, so the buffer is mapped as the engine's are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

PIECE_BYTES = 16 * 2**20  # of one system call
_ALIGNMENT = 4096


class ScratchFile:
    """A file of random bytes that ``close`` removes; ``direct`` says whether it is O_DIRECT."""

    def __init__(self, folder: Path, nbytes: int, seed: int) -> None:
        from real.arena import HostArena  # torch, which reading a profile does not need

        self.path = folder / f".calibrate-{os.getpid()}.bin"
        self.nbytes = nbytes
        self._arena = HostArena(pinned=False)
        buffer = self._arena.allocate({"buffer": min(PIECE_BYTES, nbytes)})["buffer"]
        self._view = memoryview(buffer.numpy())
        self._view[:] = np.random.default_rng(seed).bytes(len(self._view))
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            self._fd = os.open(self.path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError:
            self._fd = os.open(self.path, flags, 0o600)
            self.direct = False
        self.write(0, nbytes)

    def close(self) -> None:
        """Close and remove the file."""
        os.close(self._fd)
        self.path.unlink()
        self._view.release()
        self._arena.close()

    def read(self, at: int, nbytes: int) -> None:
        """Read ``nbytes`` at ``at`` in pieces, each into the same buffer."""
        if not self.direct:
            os.posix_fadvise(self._fd, at, nbytes, os.POSIX_FADV_DONTNEED)
        while nbytes:
            n = os.preadv(self._fd, [self._view[:nbytes]], at)
            if n <= 0:
                raise OSError(f"{self.path}: read {n} bytes at {at}")
            at, nbytes = at + n, nbytes - n

    def write(self, at: int, nbytes: int) -> None:
        """Write ``nbytes`` at ``at`` in pieces, each out of the same buffer."""
        while nbytes:
            n = os.pwritev(self._fd, [self._view[:nbytes]], at)
            at, nbytes = at + n, nbytes - n
        if not self.direct:
            os.fdatasync(self._fd)

    def seconds(self, reads: bool, nbytes: int, n_repeats: int) -> list[float]:
        """Seconds to read or write ``nbytes`` in a row, at offsets that move.

        ``ValueError`` for a size that O_DIRECT cannot move or the file does not hold.
        """
        if nbytes % _ALIGNMENT or not 0 < nbytes <= self.nbytes:
            raise ValueError(
                f"nbytes: {nbytes} must be a multiple of {_ALIGNMENT} and at most {self.nbytes}"
            )
        repeats = []
        for i in range(n_repeats + 1):
            at = (i * nbytes) % (self.nbytes - nbytes + _ALIGNMENT)
            at -= at % _ALIGNMENT
            start = time.perf_counter()
            if reads:
                self.read(at, nbytes)
            else:
                self.write(at, nbytes)
            repeats.append(time.perf_counter() - start)
        return repeats[1:]
