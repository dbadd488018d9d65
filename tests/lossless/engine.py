"""Small models, jobs and machines for the engine, and one call that runs a policy on them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from policies.cost.model import CostModel
from policies.drive import Decision, Policy, wants_feedback
from policies.placement import Placement, block_kv_bytes
from policies.plan.op import Op
from policies.run_request import BYTES_OF_DTYPE, RunRequest
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block
from policies.trace.span import Trace
from real.architecture import DTYPES
from real.backend import RealBackend
from real.feedback_plan import FeedbackPlan
from real.layout import Shape
from real.setup import Arenas, Setup
from real.weights import Source
from tests.policies_table import SMALL

torch.set_num_threads(1)

CPU = torch.device("cpu")

OPT = ModelSpec(
    name="tiny-opt",
    n_layers=3,
    d_model=32,
    n_heads=4,
    n_kv_heads=4,
    head_dim=8,
    d_ffn=64,
    vocab=101,
    max_positions=96,
    gated_ffn=False,
    tied_embeddings=True,
    learned_positions=98,
    linear_bias=True,
    norm_bias=True,
)
LLAMA = replace(
    OPT,
    name="tiny-llama",
    n_kv_heads=2,
    gated_ffn=True,
    tied_embeddings=False,
    learned_positions=0,
    linear_bias=False,
    norm_bias=False,
)
FAMILIES = {"opt": OPT, "llama": LLAMA}


@dataclass(frozen=True)
class Drawn:
    """Weights large enough that every part of a layer shows in the logits.

    Embeddings are small, or a model with tied ones would only repeat its last token.
    """

    dtype: torch.dtype
    device: torch.device = CPU
    spread: float = 0.25
    embed_spread: float = 0.05

    def array(self, name: str, layer: int | None, shape: Shape) -> npt.NDArray[np.float64]:
        draw = np.random.default_rng(zlib.crc32(f"{name} {layer}".encode()))
        around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        spread = self.embed_spread if name in ("embed.weight", "positions.weight") else self.spread
        drawn = around + spread * draw.standard_normal(shape)
        return torch.from_numpy(drawn).to(self.dtype).double().numpy()

    def chunks(self, name: str, layer: int | None, shape: Shape) -> Iterator[Tensor]:
        flat = torch.from_numpy(self.array(name, layer, shape)).view(-1).to(self.dtype)
        for chunk in flat.split(100):  # odd sizes: chunks cut rows and homes
            yield chunk.to(self.device)


@dataclass(frozen=True)
class Job:
    """Blocks and the prompts of their sequences, in order."""

    blocks: tuple[Block, ...]
    prompts: tuple[tuple[int, ...], ...]


def job(blocks: Sequence[Block], lengths: Sequence[int] | None = None, vocab: int = 101) -> Job:
    """Random prompts; ``lengths`` (in order of the sequences) makes them shorter than padded."""
    padded = [b.prompt_len for block in blocks for b in block.batches for _ in range(b.n_seqs)]
    draw = np.random.default_rng(5)
    wanted = padded if lengths is None else lengths
    prompts = tuple(tuple(draw.integers(0, vocab, n).tolist()) for n in wanted)
    return Job(tuple(blocks), prompts)


UNIFORM = job([Block(0, (Batch(2, 6), Batch(2, 6), Batch(1, 6)), 4)])
JOBS = {
    "uniform": UNIFORM,
    "two-blocks": job([Block(0, (Batch(2, 5), Batch(1, 3)), 3), Block(1, (Batch(2, 4),), 2)]),
    "ragged": job([Block(0, (Batch(3, 7), Batch(2, 5)), 4)], lengths=[7, 1, 4, 5, 2]),
    "one-token": job([Block(0, (Batch(2, 5), Batch(2, 5)), 1)]),
    "all-ones": job([Block(0, (Batch(1, 1),), 2)]),
}


@dataclass(frozen=True)
class Outcome:
    """What a run gave; ``logits[i]`` is ``[steps, vocab]`` of sequence i."""

    tokens: list[list[int]]
    logits: list[npt.NDArray[np.float64]]
    trace: Trace
    ops: tuple[Op, ...]
    decisions: dict[tuple[int, int], Decision]
    placement: Placement
    backend: RealBackend


def in_dtype(model: ModelSpec, dtype: str) -> ModelSpec:
    width = BYTES_OF_DTYPE[dtype]
    return replace(model, weight_bytes_per_elem=width, kv_bytes_per_elem=width)


def overflowing(
    model: ModelSpec, blocks: Sequence[Block], policy: Policy, share: float
) -> HardwareProfile:
    """A machine whose host holds a share of weights and KV, and what the policy needs itself."""
    held = sum(model.layer_bytes(i) for i in range(model.n_layers))
    held += max(block_kv_bytes(model, block) for block in blocks)
    return replace(SMALL, host_bytes=policy.buffers.relay_bytes + share * held)


def run(
    model: ModelSpec,
    job: Job,
    policy: Policy,
    dtype: str = "float64",
    *,
    hardware: HardwareProfile = SMALL,
    device: torch.device = CPU,
    disk_dir: Path | None = None,
    poison: bool = True,
    delay_seed: int | None = None,
    steps_run: int | None = None,
    keep: bool = False,
    source: Source | None = None,
) -> Outcome:
    """Run a policy; poison is on unless said otherwise."""
    model = in_dtype(model, dtype)
    request = RunRequest("test", model, hardware, policy, job.blocks, dtype=dtype,
                         steps_run=steps_run)  # fmt: skip
    blocks = policy.blocks(job.blocks)
    placement = policy.place(model, request.machine, blocks)
    costs = CostModel(model, request.machine, placement)
    setup = Setup(
        model,
        placement,
        blocks,
        DTYPES[dtype],
        device,
        source or Drawn(DTYPES[dtype], device),
        job.prompts,
        disk_dir=disk_dir,
        poison=poison,
        delay_seed=delay_seed,
        keep_logits=True,
    )
    decisions: dict[tuple[int, int], Decision] = {}

    def observe(block: int, step: int, decision: Decision) -> None:
        decisions[block, step] = decision

    arenas = Arenas.of(device)
    backend = RealBackend(setup, costs, arenas)
    try:
        if wants_feedback(policy):
            closed = FeedbackPlan(request, costs)
            backend.prepare_steps(closed.bounds())
            trace = backend.execute_steps(lambda ended: closed.steps(ended, observe))
        else:
            trace = backend.run(request.plan(costs, observe))
        ops = tuple(item.op for item in backend.linked)
        tokens, logits = backend.tokens(), _by_sequence(backend, blocks)
    finally:
        if not keep:
            backend.close()
            arenas.close()
    return Outcome(tokens, logits, trace, ops, decisions, placement, backend)


def _by_sequence(backend: RealBackend, blocks: Sequence[Block]) -> list[npt.NDArray[np.float64]]:
    out = []
    for block in blocks:
        for b, batch in enumerate(block.batches):
            steps = [
                backend.logits[block.index, s, b]
                for s in range(block.max_new)
                if (block.index, s, b) in backend.logits
            ]
            stacked = torch.stack(steps).double().cpu().numpy()  # [steps, S, vocab]
            out.extend(stacked[:, i] for i in range(batch.n_seqs))
    return out
