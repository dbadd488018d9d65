"""Which batches of a block a policy attends on the CPU, asked without running it.

What readers get wrong: a policy's buffers do not say. ``flexgen-cpu`` attends everything there and
sizes its workspace for that; others attend fused or unfused on the GPU in prefill, and decide in
decode. Policies that decide it are named here, and a test holds this to the plan of every policy.
"""

from __future__ import annotations

from policies.cost.model import CostModel
from policies.cpu_attention import CpuAttention
from policies.drive import Policy, step_context
from policies.plan.op import Attention
from policies.spec.workload import Block
from policies.zero_inference import ZeroInference


def attended_on_cpu(policy: Policy, belief: CostModel, block: Block) -> tuple[int, ...]:
    """1 for each batch that the middle decode step of ``block`` attends on the CPU, else 0."""
    n_batches, step = len(block.batches), block.max_new // 2
    if policy.buffers.attention is Attention.CPU:
        return (1,) * n_batches
    if not step or not isinstance(policy, CpuAttention | ZeroInference):
        return (0,) * n_batches
    return policy.decide(step_context(step, block, belief)).on_cpu
