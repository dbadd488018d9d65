"""What would make a run fit: the settings that shrink what is largest in the tier that overflowed.

What readers get wrong: a smaller batch shrinks nothing that the model alone decides. Pools are gone
through from the largest down until those that some setting shrinks are as large as what is missing;
where all of them together are not, only another model or more memory helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from policies.drive import Policy
from policies.errors import OutOfMemory
from policies.placement import Placement
from policies.plan.memory import Pool, block_pools, run_pools
from policies.plan.op import Attention
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block

WOULD_HELP = "; would help: "  # between the error and the remedy, in a row's reason

# Pools of all batches of a block, and those of the largest batch.
_OF_THE_BLOCK = (
    "resident KV", "KV", "KV on disk", "layer inputs", "layer inputs on disk", "hidden states",
    "hidden states on host",
)  # fmt: skip
_OF_A_BATCH = (
    "KV load slots", "KV store slots", "KV staging", "layer input slots", "layer input staging",
    "workspace",
)  # fmt: skip


class Sizes(NamedTuple):
    """Of a workload: whether ``prompt_len`` can be set, and the numbers that can be lowered."""

    fixed: bool
    n_batches: int


def remedy(
    error: OutOfMemory,
    model: ModelSpec,
    hardware: HardwareProfile,
    placement: Placement,
    policy: Policy,
    blocks: Sequence[Block],
    sizes: Sizes,
) -> str:
    """Settings to change after ``error``, which ``check_run`` raised for ``blocks``."""
    tier = error.tier
    largest = max(batch.n_seqs for block in blocks for batch in block.batches)
    found: dict[str, None] = {}
    covered, short = 0, error.need_bytes - error.have_bytes
    for pool in _overflowing(tier, model, hardware, placement, policy, blocks):
        if covered >= short:
            break
        own = list(_settings(pool, policy, sizes, largest))
        found |= dict.fromkeys(own)
        covered += pool.nbytes if own else 0
    if covered < short:
        found = {"a smaller model": None}
    return f"{', '.join(found)}, or a larger hardware.{tier}_bytes"


def _overflowing(
    tier: str,
    model: ModelSpec,
    hardware: HardwareProfile,
    placement: Placement,
    policy: Policy,
    blocks: Sequence[Block],
) -> list[Pool]:
    """Pools of the tier when it overflows first, the largest first."""
    held = run_pools(model, placement, policy.buffers)
    by_block = [block_pools(model, placement, policy.buffers, block) for block in blocks]
    have = hardware.usable_bytes(tier)
    in_tier = (
        [pool for pool in (*held, *own) if pool.tier.value == tier] for own in ([], *by_block)
    )
    first = next(pools for pools in in_tier if sum(pool.nbytes for pool in pools) > have)
    return sorted(first, key=lambda pool: -pool.nbytes)


def _settings(pool: Pool, policy: Policy, sizes: Sizes, largest: int) -> Iterator[str]:
    """Settings that shrink a pool; ``largest`` is the number of sequences in the largest batch."""
    name = pool.name.rpartition(": ")[2]
    by_percent = getattr(policy, "percent", None) is not None
    if by_percent and name.endswith(("weights", "weights on disk", "KV", "KV on disk")):
        yield f"a smaller share of the {name} in policy.percent"
    elif name == "resident weights" and getattr(policy, "placement", "host") != "host":
        yield "policy.placement=host"
    elif name == "resident KV":
        yield "a policy that keeps KV on the host (flexgen, tightllm)"
    elif name.endswith("on disk"):
        yield "a larger hardware.host_bytes"
    if name == "weight slots" and getattr(policy, "sep_layer", True) is False:
        yield "policy.sep_layer=true"
    if name == "relay buffers" and getattr(policy, "kv_pinned", True) is False:
        yield "policy.kv_pinned=true"
    if name == "workspace" and policy.buffers.attention is not Attention.FUSED:
        yield "policy.attention=fused"
    if name in (*_OF_THE_BLOCK, *_OF_A_BATCH):
        merges, splits = _makes_of_batches(policy)
        if largest > (sizes.n_batches if merges else 1):
            yield "a smaller workload.batch_size"
        if sizes.n_batches > 1 and (merges or (name in _OF_THE_BLOCK and not splits)):
            yield "fewer workload.n_batches"
        if sizes.fixed:
            yield "a smaller workload.prompt_len"


def _makes_of_batches(policy: Policy) -> tuple[bool, bool]:
    """Whether a policy merges the batches of a block, and whether it runs them one by one."""
    made = policy.blocks((Block(0, (Batch(1, 1), Batch(1, 1)), 1),))
    return any(batch.n_seqs > 1 for block in made for batch in block.batches), len(made) > 1
