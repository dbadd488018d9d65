"""The disk tier: two files of pages, read and written past the page cache.

O_DIRECT wants file offset, length and address to be multiples of a page, but a slice of weights or
a row of KV starts anywhere. So a staging buffer holds its data at the offset *within a page* that
the data has in the file, a read takes whole pages, and a write sends whole pages directly and the
ragged ends through the page cache, which the kernel keeps coherent. What readers get wrong: a read
moves up to two pages more than the plan counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from real.geometry import PAGE_BYTES, padded

BLOCK_BYTES = 16 * 2**20  # one system call; larger ones are not faster


def staging_bytes(nbytes: int) -> int:
    """Size of a staging buffer for ``nbytes`` that start anywhere in a page."""
    return padded(nbytes) + PAGE_BYTES


@dataclass(slots=True)
class DiskStore:
    """Named regions of one file in ``folder``; the file goes when the store is closed.

    ``direct`` says whether the page cache is bypassed: not every file system can.
    """

    folder: Path
    name: str
    direct: bool = False
    _starts: dict[str, int] = field(default_factory=dict)
    _direct_fd: int = -1
    _cached_fd: int = -1

    def create(self, sizes: Mapping[str, int]) -> None:
        """Make the file with a page-aligned region for every name."""
        end = 0
        for name, nbytes in sizes.items():
            self._starts[name] = end
            end += padded(nbytes)
        path = self.folder / self.name
        try:
            self._cached_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ValueError(f"disk folder {self.folder}: {error.strerror}: {path}") from error
        if end:
            os.posix_fallocate(self._cached_fd, 0, end)
        try:
            self._direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT)
            self.direct = True
        except (AttributeError, OSError):
            self._direct_fd = os.open(path, os.O_RDWR)

    def close(self) -> None:
        """Close and remove the file."""
        for fd in (self._direct_fd, self._cached_fd):
            if fd >= 0:
                os.close(fd)
        if self._cached_fd >= 0:
            (self.folder / self.name).unlink()
        self._direct_fd = self._cached_fd = -1

    def staged(self, region: str, start: int, nbytes: int, staging: Tensor) -> Tensor:
        """Where bytes ``[start, start + nbytes)`` of a region lie in a staging buffer."""
        first = (self._starts[region] + start) % PAGE_BYTES
        return staging[first : first + nbytes]

    def reader(self, region: str, start: int, nbytes: int, staging: Tensor) -> Callable[[], None]:
        """A function that reads a range of a region into ``staging``."""
        low = (self._starts[region] + start) // PAGE_BYTES * PAGE_BYTES
        high = padded(self._starts[region] + start + nbytes)
        blocks = list(_blocks(low, high, staging, low))
        fd = self._direct_fd

        def read() -> None:
            for offset, view in blocks:
                _all(os.preadv, fd, view, offset)

        return read

    def writer(self, region: str, start: int, nbytes: int, staging: Tensor) -> Callable[[], None]:
        """A function that writes a range of a region from ``staging``."""
        at = self._starts[region] + start
        end, base = at + nbytes, at // PAGE_BYTES * PAGE_BYTES
        low, high = padded(at), end // PAGE_BYTES * PAGE_BYTES
        if low >= high:  # no whole page
            whole, ragged = [], [*_blocks(at, end, staging, base)]
        else:
            whole = list(_blocks(low, high, staging, base))
            ragged = [*_blocks(at, low, staging, base), *_blocks(high, end, staging, base)]
        direct, cached = self._direct_fd, self._cached_fd

        def write() -> None:
            for offset, view in whole:
                _all(os.pwritev, direct, view, offset)
            for offset, view in ragged:
                _all(os.pwritev, cached, view, offset)

        return write

    def fill(self, region: str, start: int, data: Tensor) -> None:
        """Write bytes through the page cache: setting up, outside any measurement."""
        at = self._starts[region] + start
        for offset, view in _blocks(at, at + data.numel(), data, at):
            _all(os.pwritev, self._cached_fd, view, offset)

    def settle(self) -> None:
        """Put everything on the medium and forget the cached pages."""
        os.fsync(self._cached_fd)
        os.posix_fadvise(self._cached_fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _blocks(low: int, high: int, memory: Tensor, base: int) -> Iterator[tuple[int, memoryview]]:
    """File offsets and pieces of ``memory``, whose first byte belongs to file offset ``base``."""
    whole = memoryview(memory.numpy())
    for offset in range(low, high, BLOCK_BYTES):
        stop = min(offset + BLOCK_BYTES, high)
        yield offset, whole[offset - base : stop - base]


def _all(
    call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview, offset: int
) -> None:
    """Repeat a short read or write until all of ``view`` moved."""
    done = 0
    while done < len(view):
        moved = call(fd, [view[done:]], offset + done)
        if moved == 0:
            raise OSError(f"disk: nothing moved at byte {offset + done} of the file")
        done += moved
