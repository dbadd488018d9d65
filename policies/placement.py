"""Placement: in which memory weights, KV and activations live.

Shares are of bytes. What a flag asks for and what happens differ: FlexGen assigns whole tensors by
the midpoint of their cumulative size, so a nominal 20 % of the weights on the GPU puts 8.3 % there
(`flexgen_placement`). The effective shares are what costs are computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.plan.op import Scope
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block

ACT_BYTES_PER_ELEM = 2  # activations are 16 bits wide whatever the weights are


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of something over GPU, host and disk; they sum to 1."""

    gpu: float
    host: float
    disk: float

    def __post_init__(self) -> None:
        for name in ("gpu", "host", "disk"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"placement share {name}: {value} must be in [0, 1]")
        if abs(self.gpu + self.host + self.disk - 1.0) > 1e-9:
            raise ValueError(f"placement shares: {self} must sum to 1")

    @property
    def streamed(self) -> float:
        """Share that must cross the H2D link to be used."""
        return self.host + self.disk


ON_GPU = Shares(1.0, 0.0, 0.0)
ON_HOST = Shares(0.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Homes of a run: weights per layer as (attention, MLP), KV per block, activations.

    ``inputs`` books homes of layer inputs: per block and batch, how many of a sequence's tokens
    have them in place of homes of KV (empty: none). They lie where ``kv`` says.
    """

    weights: tuple[tuple[Shares, Shares], ...]
    kv: tuple[Shares, ...]
    act: Shares = ON_GPU
    inputs: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.act.disk > 0:
            share = f"{100 * self.act.disk:g} %"
            raise ValueError(f"placement of activations: must not use the disk, has {share} there")
        if self.inputs and len(self.inputs) != len(self.kv):
            raise ValueError(
                f"placement.inputs: {len(self.inputs)} blocks, must be the {len(self.kv)} of kv"
            )

    def heads(self, block: Block) -> tuple[int, ...]:
        """Tokens of each of a block's batches whose homes hold layer inputs."""
        return self.inputs[block.index] if self.inputs else (0,) * len(block.batches)

    def home_bytes(self, model: ModelSpec, block: Block) -> tuple[int, int]:
        """Bytes of a block's homes at its longest: of KV, and of layer inputs."""
        return home_bytes(model, block, self.heads(block))

    def weight_bytes(self, model: ModelSpec, layer: int, scope: Scope, tier: str) -> int:
        """Bytes of a layer's weights (or its attention or MLP) whose home is ``tier``."""
        shares = dict(zip((Scope.ATTENTION, Scope.MLP), self.weights[layer], strict=True))
        parts = shares if scope is Scope.LAYER else {scope: shares[scope]}
        held: float = sum(
            model.layer_bytes(layer, s) * getattr(share, tier) for s, share in parts.items()
        )
        return round(held)

    def streamed_bytes(self, model: ModelSpec, layer: int, scope: Scope) -> int:
        """Bytes of a layer's weights that must be loaded to compute it."""
        return self.weight_bytes(model, layer, scope, "host") + self.weight_bytes(
            model, layer, scope, "disk"
        )

    def layer_kinds(self, model: ModelSpec) -> dict[int, int]:
        """A layer of every kind and how many there are: same weights, same shares, same bytes."""
        kinds: dict[object, list[int]] = {}
        known: dict[tuple[int, bool], list[int]] = {}  # identity is quicker to look up than value
        for layer, shares in enumerate(self.weights):
            moe = model.is_moe(layer)
            layers = known.get((id(shares), moe))
            if layers is None:
                layers = known[id(shares), moe] = kinds.setdefault((shares, moe), [])
            layers.append(layer)
        return {layers[0]: len(layers) for layers in kinds.values()}

    def total_weight_bytes(self, model: ModelSpec, tier: str) -> int:
        """Bytes of all layers' weights whose home is ``tier``."""
        kinds = self.layer_kinds(model).items()
        return sum(n * self.weight_bytes(model, i, Scope.LAYER, tier) for i, n in kinds)


def block_kv_bytes(model: ModelSpec, block: Block) -> int:
    """KV bytes of a block at its longest."""
    return home_bytes(model, block, (0,) * len(block.batches))[0]


def home_bytes(model: ModelSpec, block: Block, inputs: Sequence[int]) -> tuple[int, int]:
    """Bytes of homes of KV and of layer inputs; ``inputs[b]`` tokens a sequence have the latter."""
    kv_tokens = input_tokens = 0
    for batch, n_inputs in zip(block.batches, inputs, strict=True):
        tokens = batch.prompt_len + block.max_new - 1
        if not 0 <= n_inputs <= tokens:
            raise ValueError(f"placement.inputs: {n_inputs} must be in 0..{tokens}")
        kv_tokens += batch.n_seqs * (tokens - n_inputs)
        input_tokens += batch.n_seqs * n_inputs
    layer_input = model.n_layers * model.d_model * ACT_BYTES_PER_ELEM
    return round(kv_tokens * model.kv_bytes_per_token), input_tokens * layer_input


def host_placement(
    model: ModelSpec,
    hardware: HardwareProfile,
    blocks: Sequence[Block],
    *,
    kv_on_gpu: bool = False,
    resident_layers: int = 0,
    host_buffer_bytes: int = 0,
    inputs: tuple[tuple[int, ...], ...] = (),
) -> Placement:
    """Everything in host memory; what overflows it goes to disk, KV first, then weights.

    ``resident_layers`` leading layers stay on the GPU. ``host_buffer_bytes`` is host memory that
    the policy needs for itself, ``inputs`` as in ``Placement``. Whether the result fits the tiers
    is the memory plan's question.
    """
    room = max(0.0, hardware.usable_bytes("host") - host_buffer_bytes)
    streamed = model.layers_bytes(resident_layers)
    weights_on_disk = max(0.0, 1.0 - room / streamed) if streamed else 0.0
    away = Shares(0.0, 1.0 - weights_on_disk, weights_on_disk)
    here, there = (ON_GPU, ON_GPU), (away, away)
    layers = tuple(here if i < resident_layers else there for i in range(model.n_layers))
    room = max(0.0, room - streamed * away.host)  # what weights fill leaves a rounding error
    kv = []
    for i, block in enumerate(blocks):
        need = sum(home_bytes(model, block, inputs[i] if inputs else (0,) * len(block.batches)))
        on_disk = max(0.0, 1.0 - room / need) if need else 0.0
        kv.append(ON_GPU if kv_on_gpu else Shares(0.0, 1.0 - on_disk, on_disk))
    return Placement(weights=layers, kv=tuple(kv), inputs=inputs)


def flexgen_placement(
    model: ModelSpec, blocks: Sequence[Block], percent: Sequence[float]
) -> Placement:
    """The placement that FlexGen's six percentages really produce.

    ``percent`` is (weights GPU, weights CPU, KV GPU, KV CPU, activations GPU, activations CPU); the
    rest of each pair is on disk. Weights: within attention and within the MLP, each whole matrix
    goes where the midpoint of its cumulative size falls, ordered disk, CPU, GPU. KV: whole
    sequences (papers.md 3.1; FlexLLMGen issue 108).
    """
    if len(percent) != 6:
        raise ValueError(f"policy.percent: {list(percent)} must have six numbers")
    pairs = [tuple(percent[i : i + 2]) for i in (0, 2, 4)]
    for gpu, cpu in pairs:
        if gpu < 0 or cpu < 0 or gpu + cpu > 100:
            raise ValueError(
                f"policy.percent: {list(percent)} needs pairs (GPU, CPU) >= 0 that sum to <= 100"
            )
    layers: list[tuple[Shares, Shares]] = []
    alike: dict[bool, tuple[Shares, Shares]] = {}
    for layer in range(model.n_layers):
        moe = model.is_moe(layer)
        if moe not in alike:
            attention = _by_midpoint(list(model.attention_matrices().values()), *pairs[0])
            mlp = _by_midpoint(list(model.mlp_matrices(layer).values()), *pairs[0])
            alike[moe] = attention, mlp
        layers.append(alike[moe])
    kv = tuple(_whole_sequences(block.batches[0].n_seqs, *pairs[1]) for block in blocks)
    gpu, cpu = pairs[2]
    rest = 100 - gpu - cpu  # of percentages with two digits it may be a rounding error
    if rest > 1e-9:
        raise ValueError(
            f"policy.percent: {list(percent)} leaves {rest:g} % of the activations to the disk, "
            "where they cannot be; the last two must sum to 100"
        )
    act = Shares(gpu / 100, cpu / 100, 0.0)
    return Placement(weights=tuple(layers), kv=kv, act=act)


def _by_midpoint(sizes: list[int], gpu_percent: float, cpu_percent: float) -> Shares:
    disk_percent = 100.0 - gpu_percent - cpu_percent
    total, before = sum(sizes), 0
    held = {"gpu": 0, "host": 0, "disk": 0}
    for size in sizes:
        middle = 100.0 * (before + size / 2) / total
        if middle < disk_percent:
            held["disk"] += size
        elif middle < disk_percent + cpu_percent:
            held["host"] += size
        else:
            held["gpu"] += size
        before += size
    return Shares(*(held[tier] / total for tier in ("gpu", "host", "disk")))


def _whole_sequences(n_seqs: int, gpu_percent: float, cpu_percent: float) -> Shares:
    on_gpu = int(n_seqs * gpu_percent / 100)
    if gpu_percent + cpu_percent >= 100:
        return Shares(on_gpu / n_seqs, (n_seqs - on_gpu) / n_seqs, 0.0)
    on_host = int(n_seqs * cpu_percent / 100)
    return Shares(on_gpu / n_seqs, on_host / n_seqs, (n_seqs - on_gpu - on_host) / n_seqs)
