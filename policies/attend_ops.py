"""Ops of a batch that attends on the CPU, and the LM head: what more than one schedule emits.

Schedules differ in what they put between these ops, not in the ops. What readers get wrong: a
schedule names the weights that an op reads, for a turn may use two weight slots; all other slots
follow from layer and batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies import slots
from policies.plan.op import Attention, Kind, Op, Scope
from policies.slots import Slots
from policies.step_ops import StepOps


def project_ops(step: StepOps, layer: int, k: int, reads: Slots) -> Iterator[Op]:
    """Project batch k's queries, keys and values on the GPU and send them to the host.

    ``reads`` are the layer's weights and the batch's hidden states.
    """
    hidden, projected = slots.hidden(k), step.kv_out(layer, k)
    written = (hidden, projected)
    yield step.forward_op(layer, k, Scope.QKV, Attention.CPU, reads, written)
    yield step.act_op(Kind.STORE_ACT, layer, k, 2, Scope.QKV, 1, written, (slots.queries(k),))


def attend_op(step: StepOps, layer: int, k: int) -> Op:
    """Attention of batch k on the CPU, over KV where it lies or what was read of it from disk."""
    sources: Slots = (slots.queries(k), step.host_kv(layer, k))
    if step.kv.disk > 0:
        sources = (*sources, slots.staging(step.kv_in(step.s, layer, k)))
    return Op(
        Kind.CPU_ATTEND,
        step.g,
        step.s,
        layer,
        k,
        n_seqs=step.batches[k].n_seqs,
        stop=step.n_ctx[k],
        n_new=1,
        n_ctx=step.n_ctx[k],
        attention=Attention.CPU,
        reads=sources,
        writes=(slots.attention_output(k),),
    )


def output_ops(step: StepOps, layer: int, k: int, reads: Slots) -> Iterator[Op]:
    """Bring attention's output back and multiply it by the output projection.

    ``reads`` as in ``project_ops``.
    """
    output, attended = (slots.attention_output(k),), slots.attended(k)
    written = (slots.hidden(k),)
    yield step.act_op(Kind.LOAD_ACT, layer, k, 3, Scope.OUTPUT, 1, output, (attended,))
    yield step.forward_op(layer, k, Scope.OUTPUT, Attention.CPU, (*reads, attended), written)


def head_op(step: StepOps, k: int) -> Op:
    """The LM head over the last token of each sequence of batch k."""
    hidden = (slots.hidden(k),)
    return Op(
        Kind.FORWARD,
        step.g,
        step.s,
        step.n_layers,
        k,
        scope=Scope.HEAD,
        n_seqs=step.batches[k].n_seqs,
        n_new=1,
        reads=hidden,
        writes=hidden,
    )
