"""Offline workloads: requests packed into blocks of batches.

Policies see a ``Block``: padded prompt lengths and ``max_new``. The true response lengths stay in
``Job``, which no policy is given, so an oracle cannot be written by accident.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """``n_seqs`` sequences, left-padded to ``prompt_len`` tokens, computed together."""

    n_seqs: int
    prompt_len: int

    def __post_init__(self) -> None:
        if self.n_seqs < 1:
            raise ValueError(f"n_seqs: {self.n_seqs} must be >= 1")
        if self.prompt_len < 1:
            raise ValueError(f"prompt_len: {self.prompt_len} must be >= 1")


@dataclass(frozen=True, slots=True)
class Block:
    """Batches that share every weight load; all generate ``max_new`` tokens.

    The first token comes out of prefill, the other ``max_new - 1`` out of decode steps.
    """

    index: int
    batches: tuple[Batch, ...]
    max_new: int

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("batches: is empty, a block needs at least one batch")
        if self.max_new < 1:
            raise ValueError(f"max_new: {self.max_new} must be >= 1")

    @property
    def n_seqs(self) -> int:
        """Sequences in all batches."""
        return sum(batch.n_seqs for batch in self.batches)

    @property
    def max_tokens(self) -> int:
        """Longest sequence: padded prompt plus every generated token but the last.

        The last token is sampled and never fed back, so its KV is never computed.
        """
        return max(batch.prompt_len for batch in self.batches) + self.max_new - 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request of an offline workload: true token counts."""

    prompt_tokens: int
    response_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens: {self.prompt_tokens} must be >= 1")
        if self.response_tokens < 1:
            raise ValueError(f"response_tokens: {self.response_tokens} must be >= 1")
