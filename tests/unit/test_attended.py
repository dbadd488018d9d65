"""Who attends on the CPU, asked without a run, is who attends there in one."""

import pytest

from policies.attended import attended_on_cpu
from policies.plan.op import Kind
from tests.policies_table import POLICIES, case


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_policy_is_priced_for_is_what_it_does(name):
    plan = case(name, "max-new-2")
    for block in plan.blocks:
        attends = {
            op.batch
            for op in plan.ops
            if op.kind is Kind.CPU_ATTEND and (op.block, op.step) == (block.index, 1)
        }
        found = attended_on_cpu(POLICIES[name], plan.costs, block)
        assert found == tuple(int(b in attends) for b in range(len(block.batches)))


def test_a_block_without_decode_attends_nowhere_else():
    plan = case("zero-inference-cpu", "max-new-1")
    assert attended_on_cpu(POLICIES["zero-inference-cpu"], plan.costs, plan.blocks[0]) == (0,)
