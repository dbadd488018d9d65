"""Every policy, and small scenarios that between them hold every degenerate size.

"Small" is the number of ops. Layers are as wide as real ones, because only then do weights get cut
into slices, and bytes cost a simulation nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from policies.accelerate import Accelerate
from policies.cake import Cake
from policies.cost.model import CostModel
from policies.cpu_attention import CpuAttention
from policies.drive import Decision, Policy, StepContext, drive
from policies.errors import OutOfMemory
from policies.flexgen import FlexGen
from policies.hybridserve import HybridServe
from policies.kvpr import Kvpr
from policies.mixed import Mixed
from policies.placement import Placement, block_kv_bytes
from policies.plan.memory import Buffers, check_run, place
from policies.plan.op import Op
from policies.schedule import zigzag
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block
from policies.tightllm import TightLLM
from policies.zero_inference import ZeroInference

ALL = 10**9  # more than any context


@dataclass(frozen=True, slots=True)
class FixedRecompute:
    """Recompute the last ``n_recompute`` cached tokens, whatever the machine.

    Steps take the counts in turn; a negative one says how many tokens to load instead.
    """

    n_recompute: tuple[int, ...] = (64,)
    name: str = "fixed-recompute"

    @property
    def buffers(self) -> Buffers:
        return Buffers()

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        return place(model, hardware, blocks, self.buffers)

    def decide(self, ctx: StepContext) -> Decision:
        n = self.n_recompute[ctx.step % len(self.n_recompute)]
        tails = tuple(min(n, n_ctx) if n >= 0 else max(0, n_ctx + n) for n_ctx in ctx.n_ctx())
        return Decision(tails, (1,) * ctx.n_batches)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        return zigzag(ctx, now, then)


POLICIES: dict[str, Policy] = {
    "accelerate": Accelerate(),
    "accelerate-big": Accelerate(batches="big"),
    "accelerate-pinned": Accelerate(batches="big", pinned=True),
    "flexgen": FlexGen(),
    "flexgen-pinned": FlexGen(kv_pinned=True),
    "flexgen-20-80": FlexGen(percent=(20, 80, 0, 100, 100, 0)),
    "flexgen-on-disk": FlexGen(percent=(0, 50, 0, 50, 0, 100)),
    "flexgen-kv-split": FlexGen(percent=(0, 100, 50, 50, 100, 0), kv_pinned=True),
    "flexgen-cpu-attention": FlexGen(attention="cpu"),
    "flexgen-whole-layers": FlexGen(kv_pinned=True, sep_layer=False),
    "flexgen-unfenced": FlexGen(fence=False),
    "tightllm": TightLLM(),
    "tightllm-dp": TightLLM(solver="dp"),
    "tightllm-no-distributor": TightLLM(distributor=False, solver="dp"),
    "tightllm-no-loader": TightLLM(loader=False, solver="dp"),
    "tightllm-neither": TightLLM(distributor=False, loader=False, solver="dp"),
    "tightllm-serial-links": TightLLM(serial_links=True, solver="dp"),
    "kvpr": Kvpr(),
    "kvpr-resident": Kvpr(placement="gpu"),
    "hybridserve": HybridServe(),
    "mixed": Mixed(solver="dp"),
    "mixed-no-recompute": Mixed(recompute=False, solver="dp"),
    "zero-inference": ZeroInference(),
    "zero-inference-cpu": ZeroInference(kv="cpu"),
    "cpu-attention": CpuAttention(),
    "cpu-attention-parts": CpuAttention(parts=3),
    "cpu-attention-half": CpuAttention(cpu_share=0.5),
    "cake": Cake(),
    "recompute-one": FixedRecompute((1,)),
    "recompute-all": FixedRecompute((ALL,)),
    "recompute-changing": FixedRecompute((0, ALL, 1, -1, 0, 5, -2)),
}

# ---- models and machine -----------------------------------------------------------------------

OPT = ModelSpec(
    name="opt-like",
    n_layers=3,
    d_model=2048,
    n_heads=16,
    n_kv_heads=16,
    head_dim=128,
    d_ffn=8192,
    vocab=4096,
    max_positions=4096,
    gated_ffn=False,
    tied_embeddings=True,
    learned_positions=4098,
    linear_bias=True,
    norm_bias=True,
)
GQA = replace(
    OPT,
    name="gqa",
    n_kv_heads=2,
    gated_ffn=True,
    tied_embeddings=False,
    learned_positions=0,
    linear_bias=False,
    norm_bias=False,
)
MOE = replace(GQA, name="moe", n_experts=8, top_k=2, d_expert=1024, n_dense_layers=1)
MLA = replace(
    GQA,
    name="mla",
    n_kv_heads=16,
    kv_latent_dim=512,
    rope_dim=64,
    q_lora_rank=768,
    nope_dim=128,
    v_head_dim=128,
)

SMALL = HardwareProfile(
    name="small",
    gpu_bytes=16e9,
    host_bytes=64e9,
    disk_bytes=1e12,
    gpu_reserve_bytes=0.0,
    host_reserve_bytes=0.0,
    disk_reserve_bytes=0.0,
    h2d=Link(1e-5, 12e9),
    d2h=Link(1e-5, 11e9),
    h2d_pageable=Link(2e-5, 6e9),
    d2h_pageable=Link(2e-5, 5e9),
    duplex=1.0,
    disk_read=Link(1e-4, 2e9),
    disk_write=Link(1e-4, 1.5e9),
    host_copy=Link(5e-6, 8e9),
    hbm_bytes_per_s=800e9,
    gemm=Curve((1, 32, 256, 2048), (7e11, 2e13, 6e13, 7e13)),
    attention_decode=Curve((128, 4096), (6e11, 7.5e11)),
    attention_prefill=Curve((128, 4096), (2e13, 4e13)),
    attention_window=Grid((16, 256), (128, 4096), ((5e12, 8e12), (1.5e13, 2e13))),
    cpu_attention_bytes_per_s=1e10,
    cpu_bytes_per_s=4e10,
    launch_s=1e-5,
    sync_s=2e-5,
    idle_watts=30.0,
    tdp_watts=300.0,
)


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A job on a machine. ``host_share``: host memory as a share of weights and KV, null: plenty.

    A policy's own host buffers come on top, so that the same share of data overflows for all.
    """

    model: ModelSpec
    blocks: tuple[Block, ...]
    hardware: HardwareProfile = SMALL
    host_share: float | None = None

    def machine(self, policy: Policy) -> HardwareProfile:
        """The profile on which a policy runs."""
        if self.host_share is None:
            return self.hardware
        kv = max(block_kv_bytes(self.model, block) for block in self.blocks)
        room = self.host_share * (self.model.layers_bytes() + kv)
        return replace(self.hardware, host_bytes=policy.buffers.relay_bytes + room)


def one_block(
    n_batches: int = 3, n_seqs: int = 32, prompt_len: int = 256, max_new: int = 4
) -> tuple[Block, ...]:
    return (Block(0, (Batch(n_seqs, prompt_len),) * n_batches, max_new),)


RAGGED = (
    Block(0, (Batch(16, 100), Batch(16, 260), Batch(5, 31)), 3),
    Block(1, (Batch(16, 400), Batch(2, 1)), 5),
)
LONG = one_block(n_seqs=64, prompt_len=1000, max_new=8)

SCENARIOS: dict[str, Scenario] = {
    "opt": Scenario(OPT, one_block()),
    "gqa": Scenario(GQA, one_block()),
    "moe": Scenario(MOE, one_block()),
    "mla": Scenario(MLA, one_block()),
    "one-layer": Scenario(replace(OPT, n_layers=1), one_block()),
    "one-batch": Scenario(OPT, one_block(n_batches=1)),
    "one-sequence": Scenario(OPT, one_block(n_batches=1, n_seqs=1)),
    "prompt-1": Scenario(OPT, one_block(prompt_len=1)),
    "max-new-1": Scenario(OPT, one_block(max_new=1)),
    "max-new-2": Scenario(OPT, one_block(max_new=2)),
    "all-ones": Scenario(replace(OPT, n_layers=1), one_block(1, 1, 1, 1)),
    "all-ones-twice": Scenario(replace(OPT, n_layers=1), one_block(1, 1, 1, 2)),
    "ragged": Scenario(OPT, RAGGED),
    "long": Scenario(OPT, LONG, replace(SMALL, gpu_bytes=64e9)),
    "shared-link": Scenario(OPT, RAGGED, replace(SMALL, duplex=0.8)),
    "kv-on-disk": Scenario(OPT, LONG, replace(SMALL, gpu_bytes=64e9), host_share=0.7),
    "weights-on-disk": Scenario(
        replace(OPT, n_layers=8), one_block(n_seqs=8, prompt_len=64), host_share=0.7
    ),
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A policy's plan for a scenario."""

    model: ModelSpec
    hardware: HardwareProfile
    placement: Placement
    blocks: tuple[Block, ...]
    costs: CostModel
    ops: tuple[Op, ...]
    decisions: dict[tuple[int, int], Decision]


@cache
def placed(policy: Policy, scenario: Scenario) -> Placement:
    """Where the policy places the scenario; once a process, because ``mixed`` takes its time."""
    hardware, blocks = scenario.machine(policy), policy.blocks(scenario.blocks)
    return policy.place(scenario.model, hardware, blocks)


def fits(policy: Policy, scenario: Scenario) -> bool:
    """Whether the scenario's machine holds the policy's plan."""
    hardware = scenario.machine(policy)
    blocks = policy.blocks(scenario.blocks)
    placement = placed(policy, scenario)
    try:
        check_run(scenario.model, hardware, placement, policy.buffers, blocks)
    except OutOfMemory:
        return False
    return True


CASES = [(p, s) for s in SCENARIOS for p in POLICIES if fits(POLICIES[p], SCENARIOS[s])]


def planned(policy: Policy, scenario: Scenario, belief: HardwareProfile | None = None) -> Planned:
    """Plan a scenario with a policy that believes in ``belief`` (None: in its machine)."""
    hardware = scenario.machine(policy)
    blocks = policy.blocks(scenario.blocks)
    placement = placed(policy, scenario)
    costs = CostModel(scenario.model, hardware, placement)
    mind = costs if belief is None else CostModel(scenario.model, belief, placement)
    decisions: dict[tuple[int, int], Decision] = {}

    def observe(block: int, step: int, decision: Decision) -> None:
        decisions[block, step] = decision

    ops = tuple(drive(policy, blocks, mind, observe))
    return Planned(scenario.model, hardware, placement, blocks, costs, ops, decisions)


@cache
def case(policy: str, scenario: str) -> Planned:
    """The plan of one cell of the table."""
    return planned(POLICIES[policy], SCENARIOS[scenario])
