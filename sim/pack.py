"""Packing requests into blocks of batches, as an engine without paging does.

Requests are sorted longest first, so a batch pads little; a batch is padded to its longest prompt
and a block generates until its longest response (capped by ``max_new``) is done, all members
together. What readers get wrong: a short response does not end early. Its sequence runs on to the
block's ``max_new``, but only its own tokens count in a throughput.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.errors import Infeasible
from policies.spec.workload import Batch, Block, Lengths

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks for a policy to plan, and the true lengths that no policy sees.

    ``members[g][b]`` are the requests of batch b of block g. ``cap`` is the ``max_new`` that was
    asked for (None: no cap). ``n_too_long`` requests exceed the model's positions; ``n_rejected``
    of them (all or none) were left out. ``n_requests`` counts those that run.
    """

    blocks: tuple[Block, ...]
    members: tuple[tuple[tuple[Lengths, ...], ...], ...]
    cap: int | None
    n_too_long: int = 0
    n_rejected: int = 0

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("blocks: is empty, a job needs at least one block")
        for block, batches in zip(self.blocks, self.members, strict=True):
            for batch, requests in zip(block.batches, batches, strict=True):
                longest = max((r.prompt_tokens for r in requests), default=0)
                if (len(requests), longest) != (batch.n_seqs, batch.prompt_len):
                    raise ValueError(
                        f"members: {len(requests)} requests of at most {longest} prompt tokens do "
                        f"not make {batch} of block {block.index}"
                    )

    @property
    def n_requests(self) -> int:
        """Requests that run, each in exactly one batch."""
        return sum(block.n_seqs for block in self.blocks)

    @property
    def n_cut(self) -> int:
        """Requests whose response is cut off by the cap."""
        return sum(r.response_tokens > block.max_new for block, r in self._pairs())

    @property
    def prompt_tokens(self) -> int:
        """Real prompt tokens: without padding."""
        return sum(r.prompt_tokens for _, r in self._pairs())

    @property
    def decode_tokens(self) -> int:
        """Real tokens of decode steps: sum of ``min(response, gen_len) - 1`` (prefill gives 1)."""
        return sum(min(r.response_tokens, block.max_new) - 1 for block, r in self._pairs())

    @property
    def padded_prompt_tokens(self) -> int:
        """Prompt tokens that are computed: every prompt as long as the longest of its batch."""
        return sum(b.n_seqs * b.prompt_len for block in self.blocks for b in block.batches)

    @property
    def padding_waste(self) -> float:
        """Share of the computed prompt tokens that is padding, 0..1."""
        return 1.0 - self.prompt_tokens / self.padded_prompt_tokens

    def _pairs(self) -> list[tuple[Block, Lengths]]:
        return [
            (block, request)
            for block, batches in zip(self.blocks, self.members, strict=True)
            for requests in batches
            for request in requests
        ]


def fixed(n_batches: int, batch_size: int, prompt_len: int, gen_len: int) -> Job:
    """One block of equal requests: nothing padded, nothing cut."""
    for name, value in (
        ("n_batches", n_batches),
        ("batch_size", batch_size),
        ("prompt_len", prompt_len),
        ("gen_len", gen_len),
    ):
        if value < 1:
            raise ValueError(f"{name}: {value} must be >= 1")
    requests = [Lengths(prompt_len, gen_len)] * (n_batches * batch_size)
    block, members = _block(0, requests, batch_size, None)
    return Job((block,), (members,), cap=None)


def pack(
    lengths: Sequence[Lengths],
    n_batches: int,
    batch_size: int | None,
    max_new: int | None,
    fits: Callable[[Block], bool],
    max_positions: int,
    reject_long: bool,
) -> Job:
    """Pack requests, longest first, into blocks of ``n_batches`` batches of ``batch_size``.

    ``batch_size`` None chooses, block by block, the largest power of two whose block fits, and 1
    where none does (the run then reports what is missing). It is never more than what spreads the
    remaining requests over ``n_batches`` batches. ``fits`` must be monotone: a block that fits
    still fits with fewer sequences.

    A request is too long if ``prompt + min(response, max_new) - 1 > max_positions`` (the last token
    is never fed back). Such requests are counted and logged once; ``reject_long`` leaves them out.
    The result does not depend on the order of ``lengths``. Raises ``Infeasible`` if all requests
    are rejected.
    """
    for name, value in (
        ("n_batches", n_batches),
        ("batch_size", batch_size),
        ("max_new", max_new),
        ("max_positions", max_positions),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} must be >= 1")
    if not lengths:
        raise ValueError("lengths: is empty, a job needs at least one request")
    kept, n_too_long = _admit(lengths, max_new, max_positions, reject_long)
    pending = sorted(kept, key=lambda r: (r.prompt_tokens, r.response_tokens), reverse=True)
    blocks: list[Block] = []
    members: list[tuple[tuple[Lengths, ...], ...]] = []
    start, size = 0, 1
    while start < len(pending):
        if batch_size is None:
            size = _auto_size(pending, start, n_batches, max_new, fits, len(blocks), size)
        else:
            size = batch_size
        chosen = pending[start : start + n_batches * size]
        block, batches = _block(len(blocks), chosen, size, max_new)
        blocks.append(block)
        members.append(batches)
        start += len(chosen)
    return Job(tuple(blocks), tuple(members), max_new, n_too_long, len(lengths) - len(kept))


def _admit(
    lengths: Sequence[Lengths], max_new: int | None, max_positions: int, reject_long: bool
) -> tuple[list[Lengths], int]:
    """Requests to run, and how many exceed the model's positions."""

    def positions(request: Lengths) -> int:
        generated = min(request.response_tokens, max_new or request.response_tokens)
        return request.prompt_tokens + generated - 1

    short = [r for r in lengths if positions(r) <= max_positions]
    n_too_long = len(lengths) - len(short)
    if reject_long and not short:
        raise Infeasible(
            f"all {n_too_long} requests exceed the model's {max_positions} positions (the shortest "
            f"needs {min(map(positions, lengths))}) and reject_long is set"
        )
    if n_too_long:
        warn_too_long(n_too_long, len(lengths), max_positions, rejected=reject_long)
    return (short if reject_long else list(lengths)), n_too_long


def warn_too_long(n_too_long: int, n_requests: int, max_positions: int, *, rejected: bool) -> None:
    """Say once what becomes of requests beyond the model's positions."""
    logger.warning(
        "%d of %d requests exceed the model's %d positions: %s",
        n_too_long,
        n_requests,
        max_positions,
        "rejected" if rejected else "run all the same (workload.reject_long=true drops them)",
    )


def _auto_size(
    pending: Sequence[Lengths],
    start: int,
    n_batches: int,
    max_new: int | None,
    fits: Callable[[Block], bool],
    index: int,
    guess: int,
) -> int:
    """Largest power of two whose block fits, 1 if none does; gallops up or down from ``guess``.

    Later blocks are shorter, so the size of the block before is a good guess: about two calls.
    """
    largest = 1
    while n_batches * largest < len(pending) - start:
        largest *= 2

    def fits_at(size: int) -> bool:
        chosen = pending[start : start + n_batches * size]
        return fits(_block(index, chosen, size, max_new)[0])

    size = min(guess, largest)
    if fits_at(size):
        while 2 * size <= largest and fits_at(2 * size):
            size *= 2
        return size
    while size > 1:
        size //= 2
        if size == 1 or fits_at(size):
            break
    return size


def _block(
    index: int, requests: Sequence[Lengths], batch_size: int, max_new: int | None
) -> tuple[Block, tuple[tuple[Lengths, ...], ...]]:
    """One block of consecutive requests and, beside it, who is in each batch."""
    members = tuple(
        tuple(requests[i : i + batch_size]) for i in range(0, len(requests), batch_size)
    )
    longest = max(r.response_tokens for r in requests)
    gen_len = longest if max_new is None else min(longest, max_new)
    batches = tuple(Batch(len(b), max(r.prompt_tokens for r in b)) for b in members)
    return Block(index, batches, gen_len), members
