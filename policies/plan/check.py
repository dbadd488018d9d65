"""Plan checker: the laws that a plan must keep, whoever executes it.

It reads ops in program order and follows what every slot holds: which pieces of which layer's
weights, which token ranges of which batch's KV or layer inputs. What readers get wrong: program
order is enough. The linker makes an op wait for whatever its slots need, so a plan that is right in
program order is right in time, and one that overwrites a slot too early is wrong there already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from policies.errors import PlanError
from policies.placement import Placement
from policies.plan.op import Kind, Op, Scope, Slot, Tier
from policies.spec.model import ModelSpec
from policies.spec.workload import Block

UNIQUE = "L3 keys: each key occurs once in a plan"
KV_COVERAGE = "L4 KV coverage: the sources of a forward cover tokens 0..n_ctx exactly once"
WEIGHT_COVERAGE = "L5 weight coverage: a forward's slot holds all of its layer's weights"
UNSTORED = "L4 KV coverage: only stored tokens can be loaded"
UNREAD = "L4 KV coverage: tokens at home on disk are read before they are used"
UNCOMPUTED = "L4 KV coverage: only tokens that the slot holds can be stored"
UNWRITTEN = "slots: a slot is written before it is read"
STORED_TWICE = "L4 KV coverage: a token is stored once, as its KV or as the layer's input"
PROJECTED = (
    "L4 KV coverage: a forward projects the layer inputs that were loaded for it, all of them"
)
BOOKED = "L9 memory: homes hold no more tokens of a kind than the placement books"
PAST_END = "L15: no op works for a step past the last one"

# Transfer buffers start empty; homes of weights and KV and the first hidden states do not.
_START_EMPTY = ("weight slot", "kv in", "inputs in", "inputs out", "relay", "staging")
_HOMES = ("host/kv/", "disk/kv/", "host/inputs/", "disk/inputs/")

Range = tuple[int, int]


Owner = tuple[int, int, int, int]  # block, layer, batch, step (-1 for a home)


@dataclass(slots=True)
class _Held:
    """What a slot holds of one batch in one layer: token ranges of KV, or of layer inputs."""

    owner: Owner = (-1, -1, -1, -1)
    ranges: dict[int, list[Range]] = field(default_factory=dict)  # by piece of the KV

    def add(self, op: Op, slot: Slot, span: Range) -> None:
        owner = _owner(op, slot)
        if self.owner != owner:
            self.owner, self.ranges = owner, {}
        for piece in _pieces(op):
            self.ranges.setdefault(piece, []).append(span)

    def covered(self, op: Op, slot: Slot) -> list[list[Range]]:
        """Ranges held of the op's batch, layer and step, for each piece."""
        if self.owner != _owner(op, slot):
            return [[], []]
        return [self.ranges.get(piece, []) for piece in (0, 1)]


def _owner(op: Op, slot: Slot) -> Owner:
    """Whom a slot serves: a buffer one step, a home all of them."""
    at_home = slot.name.startswith((*_HOMES, "gpu/kv/"))
    return op.block, op.layer, op.batch, -1 if at_home else op.step


def _pieces(op: Op) -> tuple[int, ...]:
    return (op.part % 2,) if op.n_parts == 2 else (0, 1)


def _tiles(ranges: Iterable[Range], stop: int) -> bool:
    """Whether the ranges cover ``[0, stop)`` exactly once."""
    at = 0
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if start != at:
            return False
        at = end
    return at == stop


def _contains(ranges: Iterable[Range], span: Range) -> bool:
    at = span[0]
    for start, end in sorted(ranges):
        if start <= at < end:
            at = end
    return at >= span[1]


class PlanChecker:
    """Checks a stream of ops; ``check`` raises ``PlanError`` naming op and law."""

    def __init__(self, model: ModelSpec, placement: Placement, blocks: Iterable[Block]) -> None:
        self._model, self._placement = model, placement
        blocks = tuple(blocks)
        self._last_step = {block.index: block.max_new - 1 for block in blocks}
        self._keys: set[str] = set()
        self._weights: dict[Slot, tuple[tuple[int, int, int], dict[Scope, set[int]], int]] = {}
        self._kv: dict[Slot, _Held] = {}  # and layer inputs
        self._booked = {
            (block.index, b): tokens
            for block in blocks
            for b, tokens in enumerate(_booked(placement, block))
        }
        self._written: set[Slot] = set()

    def check(self, op: Op) -> None:
        """Check one op and follow what it does to its slots."""
        key = op.key
        if key in self._keys:
            raise PlanError(key, UNIQUE)
        self._keys.add(key)
        if op.step > self._last_step[op.block]:
            raise PlanError(key, PAST_END)
        for slot in op.reads:
            if slot not in self._written and any(word in slot.name for word in _START_EMPTY):
                raise PlanError(key, UNWRITTEN)
        if op.kind is Kind.LOAD_WEIGHT:
            self._load_weight(op)
        elif op.kind in (Kind.LOAD_KV, Kind.READ_KV):
            self._move_kv(op, load=True)
        elif op.kind in (Kind.STORE_KV, Kind.WRITE_KV):
            self._move_kv(op, load=False)
        elif op.scope is Scope.INPUT:
            self._move_kv(op, load=op.kind in (Kind.LOAD_ACT, Kind.READ_ACT))
        elif op.kind is Kind.HOST_COPY:
            self._move_kv(op, load=op.part < op.n_parts)
        elif op.kind is Kind.CPU_ATTEND:
            self._attend_at_home(op)
        elif op.kind is Kind.FORWARD and op.layer < self._model.n_layers:
            self._forward(op)
        self._written.update(op.writes)

    def _load_weight(self, op: Op) -> None:
        on_disk = self._placement.weight_bytes(self._model, op.layer, op.scope, "disk")
        if on_disk and not any("staging" in slot.name for slot in op.reads):
            raise PlanError(op.key, WEIGHT_COVERAGE)
        owner = (op.block, op.step, op.layer)
        for slot in op.writes:
            if slot.tier is not Tier.GPU:
                continue
            held = self._weights.get(slot)
            if held is None or held[0] != owner or held[2] != op.n_parts:
                held = self._weights[slot] = (owner, {}, op.n_parts)
            held[1].setdefault(op.scope, set()).add(op.part % op.n_parts)

    def _held(self, slots: Iterable[Slot], op: Op) -> list[list[Range]]:
        out: list[list[Range]] = [[], []]
        for slot in slots:
            if slot in self._kv:
                for piece, ranges in enumerate(self._kv[slot].covered(op, slot)):
                    out[piece].extend(ranges)
        return out

    def _attend_at_home(self, op: Op) -> None:
        """Attention where the KV lies: host and disk hold parts of the same tokens."""
        self._check_read(op)
        for slot in op.reads:
            if slot in self._kv:
                held = self._kv[slot].covered(op, slot)
                if not all(_contains(ranges, (0, op.n_ctx)) for ranges in held):
                    raise PlanError(op.key, KV_COVERAGE)
        if op.n_ctx and not any(slot in self._kv for slot in op.reads):
            raise PlanError(op.key, KV_COVERAGE)

    def _check_read(self, op: Op) -> None:
        """Who uses a batch's host home needs what the disk holds of it, too."""
        at_home = [slot for slot in op.reads if slot.name.startswith(("host/kv/", "host/inputs/"))]
        read = any(slot in self._kv for slot in op.reads if slot not in at_home)
        if at_home and not read and self._placement.kv[op.block].disk > 0:
            raise PlanError(op.key, UNREAD)

    def _move_kv(self, op: Op, *, load: bool) -> None:
        span = (op.start, op.stop)
        # Reads from disk and host name the same tokens twice: each source must hold the range.
        sources = [slot for slot in op.reads if slot in self._kv]
        rule = UNSTORED if load else UNCOMPUTED
        if load:
            self._check_read(op)
        if not sources:
            raise PlanError(op.key, rule)
        for slot in sources:
            held = self._kv[slot].covered(op, slot)
            if not all(_contains(held[piece], span) for piece in _pieces(op)):
                raise PlanError(op.key, rule)
        for slot in op.writes:
            if "kv" not in slot.name and "inputs" not in slot.name:
                continue  # the issuing thread
            if slot.name.startswith(_HOMES):
                self._check_home(op, slot, span)
            self._kv.setdefault(slot, _Held()).add(op, slot, span)

    def _check_home(self, op: Op, slot: Slot, span: Range) -> None:
        """No token of a range that is stored has a home yet, and there is room for it."""
        tier, what, *where = slot.name.split("/")
        other = Slot("/".join((tier, {"kv": "inputs", "inputs": "kv"}[what], *where)), slot.tier)
        for home in (slot, other):
            if home not in self._kv:
                continue
            held = self._kv[home].covered(op, home)
            if any(max(a, span[0]) < min(b, span[1]) for i in _pieces(op) for a, b in held[i]):
                raise PlanError(op.key, STORED_TWICE)
        held = self._kv[slot].covered(op, slot) if slot in self._kv else [[], []]
        have = sum(b - a for a, b in held[_pieces(op)[0]]) + span[1] - span[0]
        if have > self._booked[op.block, op.batch][what == "inputs"]:
            raise PlanError(op.key, BOOKED)

    def _forward(self, op: Op) -> None:
        if op.scope in (Scope.LAYER, Scope.ATTENTION):
            own = [(0, op.n_front), (op.n_ctx - op.n_recompute, op.n_ctx)]
            for slots in self._sources(op):
                held = self._held(slots, op)
                if not all(_tiles([*ranges, *own], op.n_ctx) for ranges in held):
                    raise PlanError(op.key, KV_COVERAGE)
            inputs = [slot for slot in op.reads if "inputs in" in slot.name]
            if sum(b - a for a, b in self._held(inputs, op)[0]) != op.n_project:
                raise PlanError(op.key, PROJECTED)
        if op.scope in (Scope.LAYER, Scope.ATTENTION, Scope.QKV):
            computed = (op.n_ctx - op.n_recompute, op.n_ctx + op.n_new)
            for slot in op.writes:
                if "/kv" in slot.name or "/inputs" in slot.name:
                    self._kv.setdefault(slot, _Held()).add(op, slot, computed)
        self._check_weights(op)

    def _sources(self, op: Op) -> list[list[Slot]]:
        """Slots that together hold each sequence's KV: some sequences live on the GPU, some not."""
        shares = self._placement.kv[op.block]
        resident = [slot for slot in op.reads if slot.name.startswith("gpu/kv/")]
        streamed = [slot for slot in op.reads if slot not in resident]
        groups = [(shares.gpu, resident), (shares.streamed, streamed)]
        return [slots for share, slots in groups if share > 0]

    def _check_weights(self, op: Op) -> None:
        need = {
            Scope.LAYER: {Scope.ATTENTION, Scope.MLP},
            Scope.MLP: {Scope.MLP},
        }.get(op.scope, {Scope.ATTENTION})
        for scope in need:
            if not self._placement.streamed_bytes(self._model, op.layer, scope):
                continue
            if not any(self._slot_has(slot, op, scope) for slot in op.reads):
                raise PlanError(op.key, WEIGHT_COVERAGE)

    def _slot_has(self, slot: Slot, op: Op, scope: Scope) -> bool:
        held = self._weights.get(slot)
        if held is None or held[0] != (op.block, op.step, op.layer):
            return False
        return any(len(held[1].get(s, ())) == held[2] for s in (scope, Scope.LAYER))


def _booked(placement: Placement, block: Block) -> list[tuple[int, int]]:
    """Tokens of each batch that homes of KV and homes of layer inputs have room for."""
    longest = [batch.prompt_len + block.max_new - 1 for batch in block.batches]
    return [(most - n, n) for most, n in zip(longest, placement.heads(block), strict=True)]


def checked(
    ops: Iterable[Op], model: ModelSpec, placement: Placement, blocks: Iterable[Block]
) -> Iterator[Op]:
    """Pass ops through, checking each."""
    checker = PlanChecker(model, placement, blocks)
    for op in ops:
        checker.check(op)
        yield op
