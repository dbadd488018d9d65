"""Host memory of a run: anonymous pages, touched and locked in parallel, booked to the byte.

Torch's pinned allocator rounds to powers of two, so the arena maps its own memory and registers it
with CUDA. What readers get wrong: a copy must not span two registrations, so a chunk never splits
an allocation; and pinning that fails silently would turn every copy into a pageable one, so a
registered chunk has to prove that a copy from it does not block the issuing thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from real.geometry import padded

CHUNK_BYTES = 2 * 2**30
_THREADS = 8
_PROBE_BYTES = 64 * 2**20
_TOUCH_BYTES = 256 * 2**20


@dataclass(slots=True)
class _Chunk:
    """One mapping; registered as a whole."""

    pages: mmap.mmap
    tensor: Tensor  # [nbytes] uint8
    registered: bool = False
    used: int = 0

    @property
    def nbytes(self) -> int:
        return int(self.tensor.numel())

    @property
    def room(self) -> int:
        return self.nbytes - self.used

    def take(self, nbytes: int) -> Tensor:
        """The next ``nbytes`` of the chunk, page-aligned."""
        start, self.used = self.used, self.used + padded(nbytes)
        return self.tensor[start : start + nbytes]


@dataclass(slots=True)
class HostArena:
    """Named buffers in host memory, pinned for ``device`` or pageable.

    ``allocate`` replaces what was allocated before; memory that is large enough is used again,
    because pinning takes longer than most runs. ``pin_s`` is what the last allocation took.
    """

    pinned: bool
    pin_s: float = 0.0
    booked_bytes: int = 0
    _chunks: list[_Chunk] = field(default_factory=list)

    @property
    def locked_bytes(self) -> int:
        """Bytes registered with CUDA; mapped bytes where nothing is pinned."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def allocate(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Flat uint8 tensors of these many bytes; every earlier tensor becomes invalid."""
        start_s = time.perf_counter()
        self.booked_bytes = sum(padded(nbytes) for nbytes in sizes.values())
        for chunk in self._chunks:
            chunk.used = 0
        tensors = self._place(sizes)
        if tensors is None:
            self.close()
            self._chunks = [_map(nbytes) for nbytes in _chunk_sizes(sizes)]
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(_touch, _touches(self._chunks)))
                if self.pinned:
                    list(pool.map(_register, self._chunks))
            tensors = self._place(sizes)
            if tensors is None:
                raise AssertionError(f"arena: {sizes} do not fit the chunks made for them")
            if self.pinned and self._chunks:
                _check_asynchronous(max(self._chunks, key=lambda c: c.nbytes).tensor)
        self.pin_s = time.perf_counter() - start_s
        return tensors

    def close(self) -> None:
        """Unregister and let go of all memory."""
        for chunk in self._chunks:
            if chunk.registered:
                torch.cuda.check_error(
                    torch.cuda.cudart().cudaHostUnregister(chunk.tensor.data_ptr())
                )
        self._chunks = []

    def _place(self, sizes: Mapping[str, int]) -> dict[str, Tensor] | None:
        """Put every buffer into a chunk; None if the chunks do not hold them."""
        tensors = {}
        for name, nbytes in _largest_first(sizes):
            need = padded(nbytes)
            chunk = next((c for c in self._chunks if c.room >= need), None)
            if chunk is None:
                return None
            tensors[name] = chunk.take(nbytes)
        return tensors


def _largest_first(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((n, s) for n, s in sizes.items() if s), key=lambda item: -item[1])


def _chunk_sizes(sizes: Mapping[str, int]) -> Iterator[int]:
    """Chunks of about ``CHUNK_BYTES`` that hold the buffers, largest first, without waste."""
    filled = 0
    for _, nbytes in _largest_first(sizes):
        if filled and filled + padded(nbytes) > CHUNK_BYTES:
            yield filled
            filled = 0
        filled += padded(nbytes)
    if filled:
        yield filled


def _map(nbytes: int) -> _Chunk:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages faults more often, nothing else.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return _Chunk(pages, torch.frombuffer(pages, dtype=torch.uint8))


def _touches(chunks: list[_Chunk]) -> Iterator[tuple[int, int]]:
    """Address and bytes of pieces small enough to share among threads."""
    for chunk in chunks:
        for start in range(0, chunk.nbytes, _TOUCH_BYTES):
            nbytes = min(_TOUCH_BYTES, chunk.nbytes - start)
            yield chunk.tensor.data_ptr() + start, nbytes


def _touch(piece: tuple[int, int]) -> None:
    address, nbytes = piece
    ctypes.memset(address, 0, nbytes)  # releases the GIL, so threads fault pages in parallel


def _register(chunk: _Chunk) -> None:
    error = torch.cuda.cudart().cudaHostRegister(chunk.tensor.data_ptr(), chunk.nbytes, 0)
    torch.cuda.check_error(error)
    chunk.registered = True


def _check_asynchronous(host: Tensor) -> None:
    """``RuntimeError`` if a copy to the GPU blocks the caller, as copies of pageable memory do."""
    nbytes = min(host.numel(), _PROBE_BYTES)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    shares = []
    for _ in range(3):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        device.copy_(host[:nbytes], non_blocking=True)
        issued_s = time.perf_counter() - start_s
        torch.cuda.synchronize()
        shares.append(issued_s / (time.perf_counter() - start_s))
    # Small probes finish while they are issued and prove nothing.
    if nbytes == _PROBE_BYTES and min(shares) > 0.5:
        raise RuntimeError(
            f"pinned host memory: a copy of {nbytes} bytes blocked its thread for "
            f"{min(shares):.0%} of its time, so the memory is not locked"
        )
