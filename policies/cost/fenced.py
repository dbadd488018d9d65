"""Time of a step whose schedule synchronises after every (layer, batch): a sum of maxima.

Between two fences runs one slot: a batch's compute, the KV of the batch after it, the next stage's
weights in the first batch's slot, the KV that the batch before it leaves. Nothing of a slot
overlaps with another slot, so a slot takes at least its busiest lane, and a step the sum. What
readers get wrong: this is far more than the busiest lane of the step. The difference is what the
fence costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from policies.cost.model import CostModel
from policies.plan.op import Attention, Kind, Op, Scope
from policies.spec.workload import Block
from policies.step_ops import Zigzag


def fenced_step_s(costs: CostModel, block: Block, step: int, how: Zigzag, stores: bool) -> float:
    """Least seconds of one step of FlexGen's schedule: no recompute, all weights with batch 0.

    A slot counts compute (and the copies that hold it up, where KV is pageable), H2D, D2H and disk,
    and ``sync_s``. With ``stores`` false no KV leaves the GPU.
    """
    if not how.fence:
        raise ValueError("how.fence: false must be true, without fences slots overlap")
    slots = _Slots(costs, block, step, how, stores)
    n_layers = costs.model.n_layers
    kinds = [(costs.placement.weights[i], costs.model.is_moe(i)) for i in range(n_layers)]
    # A stage's slots depend on the layer and, for the weights that arrive, on the one after it.
    pairs = Counter(zip(kinds, [*kinds[1:], None], strict=True))
    first = {pair: i for i, pair in reversed(list(enumerate(zip(kinds, [*kinds[1:], None],
                                                                strict=True))))}  # fmt: skip
    layers_s = sum(n * sum(slots.of_layer(first[pair])) for pair, n in pairs.items())
    return layers_s + sum(slots.of_head())


class _Slots:
    def __init__(
        self, costs: CostModel, block: Block, step: int, how: Zigzag, stores: bool
    ) -> None:
        self.costs, self.block, self.step, self.how, self.stores = costs, block, step, how, stores
        self.batches = block.batches
        self.base = Op(Kind.FORWARD, block.index, step)
        self.seconds = cache(costs.seconds)

    def of_layer(self, layer: int) -> Iterator[float]:
        """Seconds of the slots of one layer, the fences' own included."""
        last = layer + 1 == self.costs.model.n_layers
        scopes = (Scope.ATTENTION, Scope.MLP) if self.how.sep_layer else (Scope.LAYER,)
        for scope in scopes:
            attends = scope is not Scope.MLP
            if scope is Scope.ATTENTION:
                incoming: tuple[int, Scope] | None = layer, Scope.MLP
            else:
                incoming = None if last else (layer + 1, scopes[0])
            for k in range(len(self.batches)):
                # The KV of the next batch, or of the next stage's first batch if that attends.
                next_batch = k + 1 if attends else None
                if k + 1 == len(self.batches):
                    next_batch = 0 if incoming and incoming[1] is not Scope.MLP else None
                yield self._slot(layer, scope, k, incoming if k == 0 else None, next_batch)

    def of_head(self) -> Iterator[float]:
        """Seconds of the LM head's slots; what they fetch belongs to the next step."""
        n_layers = self.costs.model.n_layers
        for batch in self.batches:
            op = replace(self.base, layer=n_layers, scope=Scope.HEAD, n_seqs=batch.n_seqs, n_new=1)
            yield self.seconds(op) + self.costs.hardware.sync_s

    def _slot(
        self,
        layer: int,
        scope: Scope,
        k: int,
        incoming: tuple[int, Scope] | None,
        next_batch: int | None,
    ) -> float:
        compute_s = self._compute_s(layer, scope, k)
        h2d_s = disk_s = d2h_s = 0.0
        if incoming is not None:
            weights = replace(self.base, layer=incoming[0], scope=incoming[1])
            disk_s += self.seconds(replace(weights, kind=Kind.READ_WEIGHT))
            # Uncut, they are read before they are loaded, and the KV is queued behind them.
            h2d_s += disk_s + self.seconds(replace(weights, kind=Kind.LOAD_WEIGHT))
        if next_batch is not None and self.step > 0:
            kv = self._kv(layer, next_batch, self._n_ctx(next_batch))
            disk_s += self.seconds(replace(kv, kind=Kind.READ_KV))
            if self.how.attention is not Attention.CPU:
                h2d_s += self.seconds(replace(kv, kind=Kind.LOAD_KV))
                if not self.how.kv_pinned:  # compute is issued after the host copies
                    compute_s += self.seconds(replace(kv, kind=Kind.HOST_COPY))
        if self.stores and scope is not Scope.MLP and k > 0:
            kv = self._kv(layer, k - 1, 1 if self.step else self.batches[k - 1].prompt_len)
            d2h_s += self.seconds(replace(kv, kind=Kind.STORE_KV))
            disk_s += self.seconds(replace(kv, kind=Kind.WRITE_KV))
        return max(compute_s, h2d_s, d2h_s, disk_s) + self.costs.hardware.sync_s

    def _n_ctx(self, k: int) -> int:
        return self.batches[k].prompt_len + self.step - 1 if self.step else 0

    def _kv(self, layer: int, k: int, n_tokens: int) -> Op:
        return replace(self.base, layer=layer, n_seqs=self.batches[k].n_seqs, stop=n_tokens)

    def _compute_s(self, layer: int, scope: Scope, k: int) -> float:
        """Compute of batch k; on the CPU attention its parts follow one another."""
        batch = self.batches[k]
        on_cpu = self.how.attention is Attention.CPU
        op = replace(
            self.base,
            layer=layer,
            scope=scope,
            n_seqs=batch.n_seqs,
            n_new=1 if self.step else batch.prompt_len,
            n_ctx=self._n_ctx(k),
            attention=Attention.UNFUSED if on_cpu else self.how.attention,
        )
        if not (on_cpu and self.step and scope is not Scope.MLP):
            return self.seconds(op)
        attend = replace(op, kind=Kind.CPU_ATTEND, stop=self._n_ctx(k))
        parts = (replace(op, scope=s, attention=Attention.CPU) for s in (Scope.QKV, Scope.OUTPUT))
        return self.seconds(attend) + sum(self.seconds(part) for part in parts)
