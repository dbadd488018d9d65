"""One iteration of continuous batching: a plan of one block, and its time in closed form.

The plan of an iteration is L layers of READ_KV, LOAD_KV and FORWARD, an LM head, and beside them
the STORE_KV of what the iteration before computed. All its layers are known once one of each class
is priced, so its time follows from a recurrence over layers; ``plan`` writes it out op by op, and
tests require both to agree. What readers get wrong: copies to the host do not hold up the
iteration. They run on, share the link with the next iteration's loads, and slow them down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policies.cost.ragged import RaggedCosts
from policies.plan.op import Kind, Op, Scope, Slot, Tier


@dataclass(frozen=True, slots=True)
class Work:
    """What one iteration does, in tokens.

    ``attention_s`` is the attention of one layer, summed over requests. ``n_load`` tokens come over
    H2D in ``n_copies`` copies a layer; ``n_disk`` of them are read from disk first. ``n_emit``
    sequences get their next token from the LM head.
    """

    n_rows: int
    n_emit: int
    attention_s: float
    n_load: int = 0
    n_copies: int = 1
    n_disk: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of an iteration; ``load_s`` includes what stores slow it down.

    ``compute_s`` counts all layers and the head, ``store_left_s`` is what remains of the stores
    that were pending, uncontended.
    """

    seconds: float
    compute_s: float
    load_s: float
    disk_s: float
    store_left_s: float


@dataclass(frozen=True, slots=True)
class Layers:
    """Per-layer seconds of an iteration: compute by class of layers, copies alike in all."""

    compute: tuple[tuple[float, int], ...]  # (seconds, layers), in order
    head_s: float
    load_s: float
    disk_s: float

    @property
    def compute_s(self) -> float:
        """All layers and the head."""
        return sum(seconds * count for seconds, count in self.compute) + self.head_s


def price(costs: RaggedCosts, work: Work, floor_s: float = 0.0) -> Layers:
    """Per-layer seconds of ``work``; compute is stretched to last ``floor_s`` in all."""
    compute = tuple(
        (costs.layer_seconds(layer, work.n_rows, work.attention_s), count)
        for layer, count in costs.layer_classes
    )
    layers = Layers(
        compute,
        costs.head_seconds(work.n_emit),
        costs.layer_copy_seconds(costs.hardware.h2d, work.n_load, work.n_copies),
        costs.layer_copy_seconds(costs.hardware.disk_read, work.n_disk, 1),
    )
    total_s = layers.compute_s
    if floor_s > total_s:
        stretch = floor_s / total_s if total_s else 0.0
        compute = tuple((seconds * stretch, count) for seconds, count in compute)
        head_s = layers.head_s * stretch if total_s else floor_s
        layers = Layers(compute, head_s, layers.load_s, layers.disk_s)
    return layers


def timing(layers: Layers, *, overlap: bool, duplex: float, store_s: float) -> Timing:
    """Time of an iteration that starts with ``store_s`` of stores pending on D2H.

    With ``overlap`` a layer computes as soon as its own KV is there; without, all loads come first.
    While H2D and D2H are both busy each runs at ``duplex`` of its rate.
    """
    compute_s = layers.compute_s
    if layers.load_s == 0.0:
        left_s = max(0.0, store_s - compute_s)
        return Timing(compute_s, compute_s, 0.0, 0.0, left_s)
    slow = 1.0 / duplex - 1.0
    disk_end = load_end = compute_end = busy_s = 0.0
    load_s, disk_s = layers.load_s, layers.disk_s
    for seconds, count in layers.compute:
        for _ in range(count):
            disk_end += disk_s
            start = disk_end if disk_end > load_end else load_end
            if store_s > 0.0:
                store_s = max(0.0, store_s - (start - load_end))
                shared = load_s if load_s < store_s else store_s
                store_s -= shared
                took = load_s + shared * slow
            else:
                took = load_s
            load_end = start + took
            busy_s += took
            if overlap:
                compute_end = (load_end if load_end > compute_end else compute_end) + seconds
    end = compute_end + layers.head_s if overlap else load_end + compute_s
    left_s = max(0.0, store_s - (end - load_end))
    return Timing(end, compute_s, busy_s, disk_end, left_s)


# ---- the same, op by op -------------------------------------------------------------------


def plan(work: Work, n_layers: int, n_store: int, step: int, *, overlap: bool) -> Iterator[Op]:
    """The ops of an iteration; ``n_store`` tokens of the one before are stored beside it."""
    if n_store:
        for layer in range(n_layers):
            yield Op(Kind.STORE_KV, 0, step, layer, n_seqs=1, stop=n_store,
                     reads=(Slot(f"new/{step - 1}/{layer}", Tier.GPU),))  # fmt: skip
    loaded = [Slot(f"kv/{layer}", Tier.GPU) for layer in range(n_layers)]
    staged = [Slot(f"staging/{layer}", Tier.HOST) for layer in range(n_layers)]
    for layer in range(n_layers):
        if work.n_disk:
            yield Op(Kind.READ_KV, 0, step, layer, n_seqs=1, stop=work.n_disk,
                     writes=(staged[layer],))  # fmt: skip
        if work.n_load:
            yield Op(Kind.LOAD_KV, 0, step, layer, n_seqs=1, stop=work.n_load,
                     reads=(staged[layer],), writes=(loaded[layer],))  # fmt: skip
    for layer in range(n_layers):
        needs = (loaded[layer],) if overlap else tuple(loaded)
        yield Op(Kind.FORWARD, 0, step, layer, n_seqs=1, n_new=work.n_rows, reads=needs,
                 writes=(Slot(f"new/{step}/{layer}", Tier.GPU),))  # fmt: skip
    if work.n_emit:
        yield Op(Kind.FORWARD, 0, step, n_layers, scope=Scope.HEAD, n_seqs=work.n_emit, n_new=1)


class PlanCosts:
    """Costs of the ops of ``plan``, for an executor: what ``price`` says of each."""

    def __init__(self, costs: RaggedCosts, layers: Layers, store_layer_s: float) -> None:
        self._costs = costs
        self._layers = layers
        self._store_s = store_layer_s
        self._compute = [s for s, count in layers.compute for _ in range(count)]

    def seconds(self, op: Op) -> float:
        """Uncontended duration of an op."""
        if op.kind is Kind.FORWARD:
            head = op.scope is Scope.HEAD
            return self._layers.head_s if head else self._compute[op.layer]
        if op.kind is Kind.LOAD_KV:
            return self._layers.load_s
        return self._layers.disk_s if op.kind is Kind.READ_KV else self._store_s

    def nbytes(self, op: Op) -> int:
        """Bytes that the op moves."""
        return self._costs.nbytes(op)

    def flops(self, op: Op) -> float:
        """FLOPs of its linear layers; attention of a ragged batch is not an op's to count."""
        return self._costs.flops(op)
