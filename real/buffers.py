"""All memory of a run, allocated once: slots, homes, workspace, token ids.

Buffers are flat bytes; whoever uses one takes typed views of it before the run. What readers get
wrong: the two workspaces that look missing are torch's own. Norms and attention have no ``out=``,
so their results come from the caching allocator, which after the warm-up serves them without the
driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from policies.homes import Source
from policies.plan.op import Scope, Slot, Tier
from real.architecture import POSITION_OFFSET, Numerics, rope_tables
from real.arena import HostArena
from real.attention import padding_mask
from real.cpu_attention import wide_dtype
from real.disk import DiskStore
from real.geometry import Geometry
from real.homes import Tokens
from real.memory import ffn_width, max_positions
from real.model import EdgeWeights, Rotation
from real.scan import Scan
from real.weights import WeightHomes

_ALIGN = 256  # bytes; GPU kernels want 16


@dataclass(slots=True)
class BatchState:
    """Token ids and, where sequences are padded, what depends on their positions.

    Rotations and masks of a padded batch are set when a step embeds its tokens and serve all layers
    of that step. Each range of tokens whose K and V the step makes has a number.
    """

    tokens: Tensor  # [prompt_len + max_new, S] int64, token-major
    pad: Tensor | None = None  # [S] int64, tokens of padding in front
    rotations: dict[int, Rotation] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)  # [S, T, K] bool

    def rotation(self, number: int) -> Rotation:
        """The rotation of a range; the step in hand fills it."""
        return self.rotations.setdefault(number, Rotation())

    def mask_of(self, number: int) -> Callable[[], Tensor] | None:
        """Says the mask of a range in the step in hand; None where no sequence is padded."""
        return None if self.pad is None else partial(self.masks.__getitem__, number)


@dataclass(slots=True)
class Buffers:
    """Memory of one run on one device."""

    found: Scan
    weights: WeightHomes
    edge: EdgeWeights
    numerics: Numerics
    device: torch.device
    pinned: HostArena
    pageable: HostArena
    disk: DiskStore | None
    slots: dict[Slot, Tensor] = field(default_factory=dict)  # uint8
    landing: dict[Slot, Tensor] = field(default_factory=dict)  # uint8
    projected: dict[int, Tensor] = field(default_factory=dict)  # by batch, flat
    states: dict[tuple[int, int], BatchState] = field(default_factory=dict)
    workspace: Tensor = field(default_factory=lambda: torch.empty(0))
    widened: Tensor = field(default_factory=lambda: torch.empty(0))  # host, for CPU attention
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    cos: Tensor | None = None  # [positions, D / 2]
    sin: Tensor | None = None

    @property
    def geometry(self) -> Geometry:
        """Sizes of the run."""
        return self.found.geometry

    def typed(self, data: Tensor) -> Tensor:
        """Flat bytes as flat elements of the run's dtype."""
        elem = self.geometry.elem_bytes
        return data[: data.numel() // elem * elem].view(self.geometry.dtype)

    # ---- allocation -----------------------------------------------------------------------

    def allocate_host(self) -> None:
        """Host slots and weight blobs, in pinned or pageable memory; workspace of the CPU."""
        self.widened = torch.empty(self.found.widened, dtype=wide_dtype(self.geometry.dtype))
        sizes: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for slot, nbytes in self.found.slots.items():
            if slot.tier is Tier.HOST:
                sizes[not slot.pinned][slot.name] = nbytes
        names = {key: f"weights/l{key[0]}/{key[1].value}" for key in self.weights.host_sizes()}
        for key, nbytes in self.weights.host_sizes().items():
            sizes[not self.found.weights_pinned][names[key]] = nbytes
        pinned, pageable = self.pinned.allocate(sizes[0]), self.pageable.allocate(sizes[1])
        for slot in self.found.slots:
            if slot.tier is Tier.HOST and self.found.slots[slot]:
                self.slots[slot] = (pinned if slot.pinned else pageable)[slot.name]
        for key, name in names.items():
            self.weights.host[key] = (pinned if self.found.weights_pinned else pageable)[name]

    def allocate_gpu(self, prompts: Sequence[Sequence[Sequence[int]]]) -> None:
        """GPU slots, workspace and token ids; ``prompts`` as ``load_prompts`` takes them."""
        found, geometry, device = self.found, self.geometry, self.device
        for slot, nbytes in found.slots.items():
            if slot.tier is Tier.GPU:
                self.slots[slot] = _bytes(nbytes, device)
        for slot, nbytes in found.landing.items():
            self.landing[slot] = _bytes(nbytes, device)
        for index, nbytes in found.projected.items():
            self.projected[index] = self.typed(_bytes(nbytes, device))
        model, dtype = geometry.model, geometry.dtype
        width = max(model.n_heads * model.head_dim, ffn_width(found))
        self.workspace = torch.empty(found.max_rows() * width, dtype=dtype, device=device)
        self.logits = torch.empty(found.max_seqs() * model.vocab, dtype=dtype, device=device)
        if not model.learned_positions:
            cos, sin = rope_tables(model, self.numerics, max_positions(geometry), dtype)
            self.cos, self.sin = cos.to(device), sin.to(device)
        at = 0
        for block in geometry.blocks:
            for b, batch in enumerate(block.batches):
                shape = (batch.prompt_len + block.max_new, batch.n_seqs)
                tokens = torch.zeros(shape, dtype=torch.int64, device=device)
                state = self.states[block.index, b] = BatchState(tokens)
                pads = [batch.prompt_len - len(p) for p in prompts[at]]
                if any(pads):
                    state.pad = torch.tensor(pads, device=device)
                at += 1

    def load_prompts(self, prompts: Sequence[Sequence[Sequence[int]]], unwritten: int = 0) -> None:
        """Write the prompts, batch by batch in order of the blocks, padded in front.

        ``unwritten`` stands for tokens that are not sampled yet.
        """
        batches = ((g, b) for g, block in enumerate(self.geometry.blocks)
                   for b in range(len(block.batches)))  # fmt: skip
        for where, held in zip(batches, prompts, strict=True):
            n = self.geometry.blocks[where[0]].batches[where[1]].prompt_len
            rows = [[0] * (n - len(prompt)) + list(prompt) for prompt in held]
            tokens = self.states[where].tokens
            tokens.fill_(unwritten)
            tokens[:n].copy_(torch.tensor(rows, dtype=torch.int64).t())

    def poison(self) -> None:
        """Fill everything that a run must write before it reads it with NaN."""
        for data in (*self.slots.values(), *self.landing.values()):
            data.fill_(255)
        for data in (self.workspace, self.logits, self.widened, *self.projected.values()):
            data.fill_(float("nan"))

    # ---- views ----------------------------------------------------------------------------

    def rows(self, slot: Slot, block: int, batch: int, source: Source = Source.KV) -> Tensor:
        """A GPU slot of KV or layer inputs as ``[tokens, row]`` of a batch, all columns."""
        row = self.geometry.columns(block, batch, source).row
        flat = self.typed(self.slots[slot])
        return flat[: flat.numel() // row * row].view(-1, row)

    def resident_rows(self, slot: Slot, block: int, batch: int) -> Tensor:
        """A resident KV slot as ``[tokens, GPU columns]``."""
        width = self.geometry.columns(block, batch).gpu
        flat = self.typed(self.slots[slot])
        return flat[: flat.numel() // width * width].view(-1, width)

    def hidden(self, slot: Slot, rows: int) -> Tensor:
        """Hidden states ``[rows, d_model]``."""
        d = self.geometry.model.d_model
        return self.typed(self.slots[slot])[: rows * d].view(rows, d)

    def blob(self, layer: int, scope: Scope) -> Tensor:
        """Host bytes of a blob."""
        return self.weights.host[layer, scope]

    # ---- positions ------------------------------------------------------------------------

    def rotation(self, state: BatchState, number: int, tokens: Tokens) -> Rotation:
        """Rotary tables of a range: views where all sequences have the same positions."""
        if self.cos is None or self.sin is None:
            return Rotation()
        if state.pad is not None:
            return state.rotation(number)  # filled by ``prepare_step``
        tables = (self.cos, self.sin)
        cos, sin = (t[slice(*tokens)].view(tokens.n_tokens, 1, 1, -1) for t in tables)
        return Rotation(cos, sin)

    def positions(self, state: BatchState, tokens: Tokens) -> Tensor | None:
        """Rows of the learned position table of a range, None where they must be gathered."""
        table = self.edge.positions
        if table is None or state.pad is not None:
            return None
        first = POSITION_OFFSET + tokens.start
        return table[first : first + tokens.n_tokens].unsqueeze(1)  # [T, 1, d]

    def prepare_step(
        self, state: BatchState, computed: Sequence[Tokens], projected: Sequence[Tokens]
    ) -> None:
        """Masks of what a padded step computes, and rotary tables of that and of what it projects.

        Ranges are numbered in this order.
        """
        if state.pad is None:
            return
        for number, tokens in enumerate(computed):
            state.masks[number] = padding_mask(state.pad, tokens.n_tokens, tokens.stop)
        if self.cos is None or self.sin is None:
            return
        for number, tokens in enumerate((*computed, *projected)):
            places = _places(state.pad, tokens)  # [T, S]
            shape, flat = (*places.shape, 1, -1), places.view(-1)
            rotation = state.rotation(number)
            rotation.cos = self.cos.index_select(0, flat).view(shape)  # [T, S, 1, D / 2]
            rotation.sin = self.sin.index_select(0, flat).view(shape)

    def gather_positions(self, state: BatchState, tokens: Tokens) -> Tensor | None:
        """Rows ``[T * S, d]`` of the learned position table for a range of a padded batch."""
        if self.edge.positions is None or state.pad is None:
            return None
        places = _places(state.pad, tokens).view(-1)
        return self.edge.positions.index_select(0, places + POSITION_OFFSET)


def _places(pad: Tensor, tokens: Tokens) -> Tensor:
    """Position of each token of a range in its own sequence ``[T, S]``; 0 for padding."""
    at = torch.arange(tokens.start, tokens.stop, device=pad.device).unsqueeze(1)  # [T, 1]
    return (at - pad).clamp_(min=0)


def _bytes(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(-(-nbytes // _ALIGN) * _ALIGN, dtype=torch.uint8, device=device)
