"""What a run needs besides its plan, and host memory that outlives runs.

What readers get wrong: prompts are checked here, but only when they are dealt to the batches; how
many there are is checked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from policies.placement import Placement
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from real.architecture import Numerics, check_supported
from real.arena import HostArena
from real.weights import Source

Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class Arenas:
    """Host memory that outlives a run, because pinning takes longer than most runs."""

    pinned: HostArena
    pageable: HostArena

    @classmethod
    def of(cls, device: torch.device) -> Arenas:
        """Arenas for a device; on the CPU twin nothing is registered."""
        return cls(HostArena(pinned=device.type == "cuda"), HostArena(pinned=False))

    @property
    def held_bytes(self) -> int:
        """Bytes mapped now."""
        return self.pinned.locked_bytes + self.pageable.locked_bytes

    def close(self) -> None:
        """Let go of all memory."""
        self.pinned.close()
        self.pageable.close()


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run needs besides its plan. ``blocks`` and ``placement`` are the policy's.

    ``poison`` fills what must not be read with NaN; ``delay_seed`` delays ops of every lane at
    random. Neither may change a token.
    """

    model: ModelSpec
    placement: Placement
    blocks: tuple[Block, ...]
    dtype: torch.dtype
    device: torch.device
    source: Source
    prompts: Prompts
    numerics: Numerics = field(default_factory=Numerics)
    gpu_bytes: int | None = None  # None: all that is free
    disk_dir: Path | None = None
    poison: bool = False
    delay_seed: int | None = None
    keep_logits: bool = False

    def __post_init__(self) -> None:
        check_supported(self.model)
        longest = max(block.max_tokens for block in self.blocks)
        if longest > self.model.max_positions:
            raise ValueError(
                f"blocks: a sequence of {longest} tokens exceeds model.max_positions "
                f"{self.model.max_positions}"
            )
        dealt = [batch.n_seqs for block in self.blocks for batch in block.batches]
        if sum(dealt) != len(self.prompts):
            raise ValueError(f"prompts: {len(self.prompts)} for {sum(dealt)} sequences")

    @property
    def dealt(self) -> list[Prompts]:
        """Prompts of each batch, in order of the blocks."""
        out, at = [], 0
        for block in self.blocks:
            for batch in block.batches:
                held = self.prompts[at : at + batch.n_seqs]
                at += batch.n_seqs
                for prompt in held:
                    if not 1 <= len(prompt) <= batch.prompt_len:
                        raise ValueError(
                            f"prompts: one has {len(prompt)} tokens, its batch takes 1 to "
                            f"{batch.prompt_len}"
                        )
                    if min(prompt) < 0 or max(prompt) >= self.model.vocab:
                        raise ValueError(
                            f"prompts: token ids must be in 0..{self.model.vocab - 1}, one has "
                            f"{min(prompt)}..{max(prompt)}"
                        )
                out.append(held)
        return out

    @property
    def ragged(self) -> bool:
        """Whether any prompt is padded."""
        batches = [batch for block in self.blocks for batch in block.batches]
        return any(
            len(prompt) < batch.prompt_len
            for batch, held in zip(batches, self.dealt, strict=True)
            for prompt in held
        )
