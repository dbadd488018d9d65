"""Compute as closures: every forward with its views of weights, hidden states and KV.

Where a forward puts new KV follows from where the cached KV is. If some was loaded, recomputed and
new tokens go behind it in the load slot, whose only reader this forward is, and what is to be
stored is copied to the store slot. If none was, the store slot takes everything; if KV is resident,
its home does. What readers get wrong: the plan never says this, because no other op can see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor

from policies import slots
from policies.errors import PlanError
from policies.plan.op import Attention, Kind, Op, Scope, Slot
from real.attention import Attend, fused, on_cpu, unfused
from real.buffers import BatchState, Buffers, places_of
from real.model import AttentionCall, AttentionWeights, Decoder, MlpWeights
from real.names import is_kv_home, loaded_kv, resident_kv, stored_kv, weight_slot
from real.scan import Rows

W = TypeVar("W", AttentionWeights, MlpWeights)
Run = Callable[[], object]
Record = Callable[[int, int, int, Tensor], None]  # block, step, batch, logits


class _Place(NamedTuple):
    """Where a part's weights lie: the slot, the layer if some are resident, the layout."""

    slot: Slot | None
    layer: int
    layout: int


class _Kv(NamedTuple):
    """KV of one forward: rows ``[tokens, row]`` and copies around the kernel."""

    rows: Tensor
    before: list[Run]
    after: list[Run]
    stale: list[Tensor]  # what poison may fill first


class Compute:
    """Makes the closures of FORWARD and CPU_ATTEND; ``record`` sees the logits of every step."""

    def __init__(self, buffers: Buffers, *, poison: bool, record: Record | None) -> None:
        self._b, self._poison, self._record = buffers, poison, record
        self._decoder = Decoder(buffers.geometry.model, buffers.numerics, buffers.edge)
        self._attentions: dict[_Place, AttentionWeights] = {}
        self._mlps: dict[_Place, MlpWeights] = {}

    def make(self, op: Op) -> Run:
        """The closure of an op."""
        if op.kind is Kind.CPU_ATTEND:
            return self._attend_on_cpu(op)
        if op.scope is Scope.HEAD:
            return self._head(op)
        rows = Rows(op.n_ctx - op.n_recompute, op.n_ctx + op.n_new)
        hidden = self._b.hidden(slots.hidden(op.batch), rows.n_tokens * op.n_seqs)  # [T * S, d]
        runs: list[Run] = []
        first = op.scope in (Scope.LAYER, Scope.ATTENTION, Scope.QKV)
        if first and op.layer == 0:
            runs += self._embed(op, rows, hidden)
        if op.scope in (Scope.LAYER, Scope.ATTENTION):
            runs += self._attention(op, rows, hidden)
        elif op.scope is Scope.QKV:
            runs += self._project(op, rows, hidden)
        elif op.scope is Scope.OUTPUT:
            source = self._b.typed(self._b.slots[slots.attended(op.batch)])
            source = source[: op.n_seqs * self._q_dim].view(op.n_seqs, self._q_dim)  # [S, H * D]
            runs.append(partial(self._decoder.output, self._attention_weights(op), hidden, source))
        if op.scope in (Scope.LAYER, Scope.MLP):
            runs += self._mlp(op, hidden)
        return runs[0] if len(runs) == 1 else _sequence(runs)

    # ---- parts of a forward ---------------------------------------------------------------

    def _embed(self, op: Op, rows: Rows, hidden: Tensor) -> list[Run]:
        state = self._state(op)
        ids = state.tokens[rows.start : rows.stop].view(-1)  # [T * S]
        embed = self._decoder.embed
        run: Run
        if state.pad is None:
            run = partial(embed, ids, self._b.positions(state, rows), hidden)
        else:
            places, prepare = places_of(state.pad, rows), self._b.prepare_step

            def run() -> None:
                embed(ids, prepare(state, places, rows), hidden)

        whole = self._b.slots[slots.hidden(op.batch)]
        return [partial(whole.fill_, 255), run] if self._poison else [run]

    def _attention(self, op: Op, rows: Rows, hidden: Tensor) -> list[Run]:
        model, state = self._b.geometry.model, self._state(op)
        kv = self._kv(op, rows)
        cache = kv.rows[: rows.stop].view(
            rows.stop, op.n_seqs, 2, model.n_kv_heads, model.head_dim
        )  # [K, S, 2, G, D]
        q = self._b.workspace[: hidden.shape[0] * self._q_dim]
        heads = q.view(rows.n_tokens, op.n_seqs, model.n_heads, model.head_dim)  # [T, S, H, D]
        mask_of = None if state.pad is None else state.get_mask
        attend: Attend
        if op.attention is Attention.FUSED:
            attend = fused(heads, cache, mask_of, prefill=op.step == 0)
        else:
            attend = unfused(heads, cache, mask_of)
        call = AttentionCall(
            hidden,
            q.view(-1, self._q_dim),
            kv.rows[rows.start : rows.stop].view(hidden.shape[0], self._b.geometry.kv_elems),
            self._b.rotation(state, rows),
            attend,
        )
        run = partial(self._decoder.attention, self._attention_weights(op), call)
        stale = [self._b.workspace, *kv.stale] if self._poison else []
        return [*(partial(t.fill_, float("nan")) for t in stale), *kv.before, run, *kv.after]

    def _kv(self, op: Op, rows: Rows) -> _Kv:
        """Where this forward finds and leaves KV."""
        loaded, stored, resident = loaded_kv(op), stored_kv(op), resident_kv(op)
        columns = self._b.geometry.columns(op.block, op.batch)
        slot = loaded or stored or resident
        if slot is None:
            raise PlanError(op.key, "engine: an attention needs a slot for its KV")
        if columns.streamed == 0:
            return _Kv(self._b.kv_rows(slot, op.block, op.batch), [], [], [])
        data = self._b.kv_rows(slot, op.block, op.batch)  # [tokens, row]
        before: list[Run] = []
        after: list[Run] = []
        stale = [data[rows.start :]]
        if resident is not None and columns.gpu:
            home = self._b.resident_rows(resident, op.block, op.batch)  # [tokens, GPU columns]
            mine = data[:, : columns.gpu]
            if rows.start:
                before.append(partial(mine[: rows.start].copy_, home[: rows.start]))
            fresh = slice(rows.start, rows.stop)
            after.append(partial(home[fresh].copy_, mine[fresh]))
        stores = self._b.found.stores.get((op.block, op.step, op.layer, op.batch))
        if loaded is not None and stored is not None:
            target = self._b.kv_rows(stored, op.block, op.batch)
            stale.append(target)
            if stores is not None:
                kept = slice(*stores)
                after.append(partial(target[kept].copy_, data[kept]))
        return _Kv(data, before, after, stale)

    def _project(self, op: Op, rows: Rows, hidden: Tensor) -> list[Run]:
        """Q, K and V of one new token, packed for the CPU; the KV also goes to the store slot."""
        if op.n_new != 1 or op.n_recompute:
            raise PlanError(op.key, "engine: attention on the CPU decodes one token, none again")
        stored = stored_kv(op)
        if stored is None:
            raise PlanError(op.key, "engine: attention on the CPU needs a slot to store from")
        kv = self._b.kv_rows(stored, op.block, op.batch)[rows.start].view(op.n_seqs, -1)
        q = self._b.workspace[: op.n_seqs * self._q_dim].view(op.n_seqs, -1)  # [S, H * D]
        packed = self._b.projected[op.batch]
        packed = packed[: op.n_seqs * (self._q_dim + kv.shape[1])].view(op.n_seqs, -1)
        state = self._state(op)
        call = AttentionCall(hidden, q, kv, self._b.rotation(state, rows), lambda: q)
        return [
            partial(self._decoder.project, self._attention_weights(op), call),
            partial(packed[:, : self._q_dim].copy_, q),
            partial(packed[:, self._q_dim :].copy_, kv),
        ]

    def _attend_on_cpu(self, op: Op) -> Run:
        model, state = self._b.geometry.model, self._state(op)
        home = next(s for s in op.reads if is_kv_home(s))
        kv = self._b.typed(self._b.slots[home])
        n_elems = op.n_ctx * op.n_seqs * self._b.geometry.kv_elems
        cache = kv[:n_elems].view(op.n_ctx, op.n_seqs, 2, model.n_kv_heads, model.head_dim)
        width = self._q_dim + self._b.geometry.kv_elems
        qkv = self._b.typed(self._b.slots[slots.queries(op.batch)])[: op.n_seqs * width].view(
            op.n_seqs, width
        )
        out = self._b.typed(self._b.slots[op.writes[0]])
        out = out[: op.n_seqs * self._q_dim].view(op.n_seqs, self._q_dim)  # [S, H * D]
        pad = None if state.pad is None else state.pad.cpu()
        return partial(on_cpu, qkv, cache, pad, out, model.n_heads)

    def _mlp(self, op: Op, hidden: Tensor) -> list[Run]:
        weights = self._mlp_weights(op)
        width = weights.up[-1].stop
        inner = self._b.workspace[: hidden.shape[0] * width].view(-1, width)  # [T * S, F or 2 F]
        run = partial(self._decoder.mlp, weights, hidden, inner)
        return [partial(inner.fill_, float("nan")), run] if self._poison else [run]

    def _head(self, op: Op) -> Run:
        state = self._state(op)
        rows = self._b.found.rows[op.block, op.step, op.batch]
        hidden = self._b.hidden(slots.hidden(op.batch), rows.n_tokens * op.n_seqs)
        last = hidden[-op.n_seqs :]  # [S, d], token-major: the last token of every sequence
        vocab = self._b.geometry.model.vocab
        logits = self._b.logits[: op.n_seqs * vocab].view(op.n_seqs, vocab)
        at = self._b.geometry.blocks[op.block].batches[op.batch].prompt_len + op.step
        run = partial(self._decoder.head, last, logits, state.tokens[at])
        if self._record is None:
            return run
        return _sequence([run, partial(self._record, op.block, op.step, op.batch, logits)])

    # ---- views ----------------------------------------------------------------------------

    @property
    def _q_dim(self) -> int:
        model = self._b.geometry.model
        return model.n_heads * model.head_dim

    def _state(self, op: Op) -> BatchState:
        return self._b.states[op.block, op.batch]

    def _attention_weights(self, op: Op) -> AttentionWeights:
        build = self._b.weights.attention
        return self._cached(self._attentions, self._place(op, Scope.ATTENTION), build, op.layer)

    def _mlp_weights(self, op: Op) -> MlpWeights:
        build = self._b.weights.mlp
        return self._cached(self._mlps, self._place(op, Scope.MLP), build, op.layer)

    def _place(self, op: Op, part: Scope) -> _Place:
        """What the addresses of a part's weights depend on."""
        weights = self._b.weights
        layout = weights.layouts[op.layer, weights.scope_of(op.layer, part)]
        layer = op.layer if layout.resident else -1  # resident parts are the layer's own
        return _Place(weight_slot(op), layer, id(layout))

    def _cached(
        self,
        views: dict[_Place, W],
        place: _Place,
        build: Callable[[int, Tensor | None], W],
        layer: int,
    ) -> W:
        """Views of weights, made once for each place."""
        if place not in views:
            slot = None if place.slot is None else self._b.typed(self._b.slots[place.slot])
            views[place] = build(layer, slot)
        return views[place]


def _sequence(runs: list[Run]) -> Run:
    def run() -> None:
        for each in runs:
            each()

    return run


def warm_up_ops(ops: Sequence[Op]) -> list[int]:
    """Positions of forwards that between them run every kernel: one of each shape, from prefill,
    the first and the last decode step.
    """
    forwards = [(i, op) for i, op in enumerate(ops) if op.kind is Kind.FORWARD]
    last = max(op.step for _, op in forwards)
    shapes: dict[object, int] = {}
    for i, op in forwards:
        if op.step in (0, 1, last):
            shape = (op.scope, op.attention, op.n_seqs, op.n_new, op.n_recompute, op.n_ctx)
            shapes.setdefault((*shape, op.batch if op.layer == 0 else -1), i)
    return sorted(shapes.values())
