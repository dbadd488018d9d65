"""How a serving machine is run: budgets, capacities and the switches of the analysis.

What readers get wrong: capacities are of the whole tensor-parallel group. ``capacity_tokens`` None
is what the group's memory leaves beside weights and activations; the kappa paper's own value is
unknown, so its tables need it as an input.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.errors import OutOfMemory
from policies.placement import ACT_BYTES_PER_ELEM
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec

KV_STORES = ("trace", "lru")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of every machine of a run; tokens unless a name says otherwise.

    ``kv_store`` ``trace``: the history of every request is in host memory, as the trace says;
    ``lru``: only what an LRU store of ``host_store_bytes`` over ``disk_store_bytes`` holds (None:
    all usable host memory). ``copy_tokens`` cuts loads into copies of so many tokens (None: one
    copy a layer). ``attention`` and ``lm_head`` False leave out those FLOPs. ``watermark`` is the
    share of memory that admission leaves to growing contexts.
    """

    budget_tokens: int = 8192
    max_seqs: int = 1024
    capacity_tokens: int | None = None
    max_new: int = 2048
    prefill_only: bool = False
    overlap: bool = True
    write_back: bool = True
    floor_s: float = 0.0
    attention: bool = True
    lm_head: bool = True
    copy_tokens: int | None = None
    kv_store: str = "trace"
    host_store_bytes: float | None = None
    disk_store_bytes: float = 0.0
    block_tokens: int | None = None
    window: int = 512
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("budget_tokens", "max_seqs", "max_new", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"serve.{name}: {getattr(self, name)} must be >= 1")
        for name in ("capacity_tokens", "copy_tokens", "block_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"serve.{name}: {value} must be >= 1 or null")
        for name in ("floor_s", "disk_store_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"serve.{name}: {getattr(self, name)} must be >= 0")
        if self.host_store_bytes is not None and not self.host_store_bytes >= 0:
            raise ValueError(
                f"serve.host_store_bytes: {self.host_store_bytes} must be >= 0 or null"
            )
        if self.kv_store not in KV_STORES:
            raise ValueError(f"serve.kv_store: {self.kv_store!r} is none of {', '.join(KV_STORES)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"serve.watermark: {self.watermark} must be in [0, 1)")


def kv_capacity_tokens(model: ModelSpec, hardware: HardwareProfile, options: ServeOptions) -> int:
    """Tokens whose KV fits beside weights and the activations of a full iteration.

    ``OutOfMemory`` if not even one token does. Activations: input, output and the widest
    intermediate of a layer, twice (gate and up).
    """
    if options.capacity_tokens is not None:
        return options.capacity_tokens
    widest = max(model.d_ffn, model.top_k * model.d_expert, model.n_heads * model.qk_dim)
    per_row = (2 * model.d_model + 2 * widest) * ACT_BYTES_PER_ELEM
    activations = options.budget_tokens * per_row
    used = model.weight_bytes + activations
    have = hardware.usable_bytes("gpu")
    tokens = int((have - used) // model.kv_bytes_per_token)
    if tokens < 1:
        need = used + round(model.kv_bytes_per_token)
        largest = "weights" if model.weight_bytes >= activations else "serve.budget_tokens"
        raise OutOfMemory("gpu", need, int(have), largest)
    return tokens


def store_blocks(
    model: ModelSpec, hardware: HardwareProfile, options: ServeOptions, block_tokens: int
) -> tuple[int, int]:
    """Capacity of the host store and of the disk store in whole blocks."""
    block_bytes = block_tokens * model.kv_bytes_per_token
    host = options.host_store_bytes
    if host is None:
        host = hardware.usable_bytes("host")
    for name, asked, tier in (
        ("host_store_bytes", host, "host"),
        ("disk_store_bytes", options.disk_store_bytes, "disk"),
    ):
        have = hardware.usable_bytes(tier)
        if asked > have:
            raise ValueError(f"serve.{name}: {asked} exceeds the usable {have} bytes of {tier}")
    return int(host // block_bytes), int(options.disk_store_bytes // block_bytes)
