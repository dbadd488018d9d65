"""Compute as closures: every forward with its views of weights, hidden states and KV.

Where a forward puts new KV follows from where the cached KV is. If some was loaded, projected,
recomputed and new tokens join it in the load slot, whose only reader this forward is, and what is
to be stored is copied to the store slot. If none was, the store slot takes everything; if KV is
resident, its home does. What readers get wrong: the plan never says this, because no other op can
see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor

from policies import slots
from policies.errors import PlanError
from policies.homes import Source
from policies.plan.op import Attention, Kind, Op, Scope, Slot
from real.attention import Attend, fused, unfused
from real.buffers import BatchState, Buffers
from real.cpu_attention import attend_on_cpu
from real.homes import Tokens
from real.model import Attended, AttentionCall, AttentionWeights, Decoder, MlpWeights, NewKeys
from real.names import (
    is_home,
    loaded_inputs,
    loaded_kv,
    resident_kv,
    stored_inputs,
    stored_kv,
    weight_slot,
)
from real.scan import Rows, rows_of, shape_of

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
        rows = rows_of(op)
        hidden = self._b.hidden(slots.hidden(op.batch), rows.n_tokens * op.n_seqs)  # [T * S, d]
        runs: list[Run] = []
        first = op.scope in (Scope.LAYER, Scope.ATTENTION, Scope.QKV)
        if first and op.layer == 0:
            runs += self._embed(op, rows, hidden)
        if op.scope in (Scope.LAYER, Scope.ATTENTION):
            runs += self._keep_inputs(op, rows, hidden)
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
        """Hidden states of the tokens in hand; before them, what padded positions decide."""
        state, buffers, embed = self._state(op), self._b, self._decoder.embed
        whole = buffers.slots[slots.hidden(op.batch)]
        runs: list[Run] = [partial(whole.fill_, 255)] if self._poison else []
        if state.pad is not None:
            computed = tuple(tokens for tokens, _ in rows.parts)
            projected = buffers.found.inputs.get((op.block, op.step, op.batch), ())
            runs.append(partial(buffers.prepare_step, state, computed, projected))
        for tokens, at in rows.parts:
            ids = state.tokens[slice(*tokens)].view(-1)  # [T * S]
            target = hidden[_flat(at, op)]
            if state.pad is None:
                runs.append(partial(embed, ids, buffers.positions(state, tokens), target))
            else:
                runs.append(partial(self._embed_padded, state, tokens, ids, target))
        return runs

    def _embed_padded(self, state: BatchState, tokens: Tokens, ids: Tensor, target: Tensor) -> None:
        self._decoder.embed(ids, self._b.gather_positions(state, tokens), target)

    def _keep_inputs(self, op: Op, rows: Rows, hidden: Tensor) -> list[Run]:
        """Copy the layer's inputs that this step stores to the slot from which they leave."""
        kept = self._b.found.moved(self._b.found.stores, Source.INPUT, op)
        slot = stored_inputs(op)
        if slot is None and not kept.spans:
            return []
        if slot is None:
            raise PlanError(op.key, "engine: layer inputs to be stored need a slot to leave from")
        target = self._b.rows(slot, op.block, op.batch, Source.INPUT)  # [tokens, row]
        source = hidden.view(rows.n_tokens, -1)  # [T, row]
        runs: list[Run] = [partial(target.fill_, float("nan"))] if self._poison else []
        at = 0
        for tokens in kept.spans:
            if not rows.start <= tokens.start <= tokens.stop <= rows.stop:
                raise PlanError(op.key, f"engine: does not compute tokens {tokens}, to be stored")
            first = rows.n_front + tokens.start - rows.start
            n = tokens.n_tokens
            runs.append(partial(target[at : at + n].copy_, source[first : first + n]))
            at += n
        return runs

    def _attention(self, op: Op, rows: Rows, hidden: Tensor) -> list[Run]:
        buffers = self._b
        kv = self._kv(op, rows)
        q = buffers.workspace[: hidden.shape[0] * self._q_dim].view(-1, self._q_dim)
        keys, attended = [], []
        for number, (tokens, at) in enumerate(rows.parts):
            mine = _flat(at, op)
            keys.append(self._keys(op, number, tokens, mine, kv.rows, q[mine]))
            attend = self._attend(op, number, tokens, kv.rows, q[mine])
            attended.append(Attended(hidden[mine], attend))
        inputs, projected = self._projections(op, len(keys), kv.rows)
        call = AttentionCall(hidden, q, tuple(keys), tuple(attended), inputs, tuple(projected))
        run = partial(self._decoder.attention, self._attention_weights(op), call)
        stale = [buffers.workspace, *kv.stale] if self._poison else []
        return [*(partial(t.fill_, float("nan")) for t in stale), *kv.before, run, *kv.after]

    def _keys(
        self, op: Op, number: int, tokens: Tokens, rows: slice, kv: Tensor, q: Tensor | None = None
    ) -> NewKeys:
        """Keys and values of a numbered range of tokens, written to ``kv [tokens, row]``."""
        target = kv[slice(*tokens)].view(-1, self._b.geometry.kv_elems)  # [T * S, 2 * G * D]
        return NewKeys(rows, target, self._b.rotation(self._state(op), number, tokens), q)

    def _attend(self, op: Op, number: int, tokens: Tokens, kv: Tensor, q: Tensor) -> Attend:
        """Attention of a range to all tokens up to its end."""
        model = self._b.geometry.model
        heads = q.view(-1, op.n_seqs, model.n_heads, model.head_dim)  # [T, S, H, D]
        shape = (tokens.stop, op.n_seqs, 2, model.n_kv_heads, model.head_dim)
        cache = kv[: tokens.stop].view(shape)  # [K, S, 2, G, D]
        mask_of = self._state(op).mask_of(number)
        if op.attention is Attention.FUSED:
            return fused(heads, cache, mask_of, prefill=op.step == 0)
        return unfused(heads, cache, mask_of)

    def _projections(self, op: Op, number: int, kv: Tensor) -> tuple[Tensor | None, list[NewKeys]]:
        """Loaded layer inputs ``[P * S, d]``, one range behind the other, and where their keys go.

        Ranges are numbered from ``number`` on.
        """
        slot = loaded_inputs(op)
        if slot is None:
            return None, []
        rows = self._b.rows(slot, op.block, op.batch, Source.INPUT)  # [tokens, row]
        inputs = rows[: op.n_project].view(op.n_project * op.n_seqs, -1)
        made, at = [], 0
        for i, tokens in enumerate(self._b.found.inputs[op.block, op.step, op.batch]):
            mine = _flat(Tokens(at, at + tokens.n_tokens), op)
            made.append(self._keys(op, number + i, tokens, mine, kv))
            at += tokens.n_tokens
        return inputs, made

    def _kv(self, op: Op, rows: Rows) -> _Kv:
        """Where this forward finds and leaves KV."""
        loaded, stored, resident = loaded_kv(op), stored_kv(op), resident_kv(op)
        columns, found = self._b.geometry.columns(op.block, op.batch), self._b.found
        slot = loaded or stored or resident
        if slot is None:
            raise PlanError(op.key, "engine: an attention needs a slot for its KV")
        data = self._b.rows(slot, op.block, op.batch)  # [tokens, row]
        if columns.streamed == 0:
            return _Kv(data, [], [], [])
        before: list[Run] = []
        after: list[Run] = []
        stale = _between(found.moved(found.loads, Source.KV, op).spans, data)
        if resident is not None and columns.gpu:
            home = self._b.resident_rows(resident, op.block, op.batch)  # [tokens, GPU columns]
            mine = data[:, : columns.gpu]
            cached, fresh = slice(rows.n_front, rows.start), slice(rows.start, rows.stop)
            if rows.n_front < rows.start:
                before.append(partial(mine[cached].copy_, home[cached]))
            after.append(partial(home[fresh].copy_, mine[fresh]))
        if loaded is not None and stored is not None:
            target = self._b.rows(stored, op.block, op.batch)
            stale.append(target)
            for tokens in found.moved(found.stores, Source.KV, op).spans:
                kept = slice(*tokens)
                after.append(partial(target[kept].copy_, data[kept]))
        return _Kv(data, before, after, stale)

    def _project(self, op: Op, rows: Rows, hidden: Tensor) -> list[Run]:
        """Q, K and V of one new token, packed for the CPU; the KV also goes to the store slot."""
        if op.n_new != 1 or rows.n_tokens != 1:
            raise PlanError(op.key, "engine: attention on the CPU decodes one token, none again")
        stored = stored_kv(op)
        if stored is None:
            raise PlanError(op.key, "engine: attention on the CPU needs a slot to store from")
        q = self._b.workspace[: op.n_seqs * self._q_dim].view(op.n_seqs, -1)  # [S, H * D]
        (tokens, at), *_ = rows.parts
        data = self._b.rows(stored, op.block, op.batch)  # [tokens, row]
        keys = self._keys(op, 0, tokens, _flat(at, op), data, q)
        packed = self._b.projected[op.batch]
        packed = packed[: op.n_seqs * (self._q_dim + keys.kv.shape[1])].view(op.n_seqs, -1)
        call = AttentionCall(hidden, q, (keys,), ())
        return [
            partial(self._decoder.project, self._attention_weights(op), call),
            partial(packed[:, : self._q_dim].copy_, q),
            partial(packed[:, self._q_dim :].copy_, keys.kv),
        ]

    def _attend_on_cpu(self, op: Op) -> Run:
        model, state = self._b.geometry.model, self._state(op)
        home = next(s for s in op.reads if is_home(s))
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
        return partial(attend_on_cpu, qkv, cache, pad, out, model.n_heads, self._b.widened)

    def _mlp(self, op: Op, hidden: Tensor) -> list[Run]:
        weights = self._mlp_weights(op)
        parts, width = 1 if weights.gate is None else 2, weights.up[-1].stop
        inner = self._b.workspace[: parts * hidden.shape[0] * width]
        inner = inner.view(parts, -1, width)  # [1 or 2, T * S, F]
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


def _flat(at: Tokens, op: Op) -> slice:
    """Rows of all sequences that belong to rows of tokens."""
    return slice(at.start * op.n_seqs, at.stop * op.n_seqs)


def _between(loaded: Sequence[Tokens], data: Tensor) -> list[Tensor]:
    """Rows of ``data`` in none of the ranges."""
    ends = [0, *(tokens.stop for tokens in loaded)]
    starts = [*(tokens.start for tokens in loaded), data.shape[0]]
    return [data[a:b] for a, b in zip(ends, starts, strict=True) if a < b]


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
            shapes.setdefault(warm_up_shape(op), i)
    return sorted(shapes.values())


def warm_up_shape(op: Op) -> tuple[object, ...]:
    """Forwards of one of these run the same kernels; the first layer also embeds, per batch."""
    return (*shape_of(op), op.batch if op.layer == 0 else -1)
