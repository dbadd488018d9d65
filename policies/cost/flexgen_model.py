"""FlexGen's own cost model: seconds of one layer, linear in where weights, KV and activations lie.

It is the objective of FlexGen's placement search (papers.md 3.3), kept as its authors fitted it.
What readers get wrong: its rates are not a machine's. They were fitted to whole runs on a T4 and
hold what the formula leaves out (4.3 TFLOP/s of matrix products in decode). The authors' model only
knows attention on the CPU over KV in host memory; ``kv_load_bytes_per_s`` is ours, for runs that
load it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.cost.flops import attention_gemm_elems, dense_mlp_elems, expert_elems
from policies.spec.model import ModelSpec

Row = NDArray[np.float64]  # (9,), coefficients of SHARES
# Of weights, KV and activations (hidden states): on GPU, host, disk.
SHARES = ("w_gpu", "w_host", "w_disk", "kv_gpu", "kv_host", "kv_disk", "h_gpu", "h_host", "h_disk")
GIB, TERA = 2.0**30, 1e12


@dataclass(frozen=True, slots=True)
class FlexGenRates:
    """Bytes/s and FLOP/s, each as the term it divides; T4 values are the authors' fit.

    ``kv_load_bytes_per_s`` None: attention over host KV runs on the CPU, which loads none.
    ``fitted_cpu`` corrects the CPU's rate for narrow models and small batches as the authors do.
    """

    h2d_bytes_per_s: float
    kv_store_bytes_per_s: float
    hidden_store_bytes_per_s: float
    disk_read_bytes_per_s: float
    kv_write_prefill_bytes_per_s: float
    hidden_write_prefill_bytes_per_s: float
    write_decode_bytes_per_s: float
    matmul_prefill_flops_per_s: float
    matmul_decode_flops_per_s: float
    attention_prefill_flops_per_s: float
    attention_decode_flops_per_s: float
    cpu_attention_flops_per_s: float
    disk_weight_efficiency: float = 1.0
    kv_load_bytes_per_s: float | None = None
    fitted_cpu: bool = False

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, float) and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"flexgen rates: {name} {value} must be a finite number > 0")


T4_FITTED = FlexGenRates(
    h2d_bytes_per_s=12.89 * GIB,
    kv_store_bytes_per_s=0.97 * GIB,
    hidden_store_bytes_per_s=4.82 * GIB,
    disk_read_bytes_per_s=0.473 * GIB,
    kv_write_prefill_bytes_per_s=0.746 * GIB,
    hidden_write_prefill_bytes_per_s=2.015 * GIB,
    write_decode_bytes_per_s=2.015 * GIB,
    matmul_prefill_flops_per_s=21.24 * TERA,
    matmul_decode_flops_per_s=4.3 * TERA,
    attention_prefill_flops_per_s=9.97 * TERA,
    attention_decode_flops_per_s=0.079 * TERA,
    cpu_attention_flops_per_s=0.0123 * TERA,
    disk_weight_efficiency=0.95,
    fitted_cpu=True,
)


@dataclass(frozen=True, slots=True)
class FlexGenJob:
    """One block: ``n_batches`` batches of ``batch_size`` prompts of the same length."""

    model: ModelSpec
    prompt_len: int
    gen_len: int
    batch_size: int
    n_batches: int

    def __post_init__(self) -> None:
        for name in ("prompt_len", "gen_len", "batch_size", "n_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"flexgen job: {name} {getattr(self, name)} must be >= 1")

    @property
    def n_seqs(self) -> int:
        """Sequences of the block."""
        return self.batch_size * self.n_batches


@dataclass(frozen=True, slots=True)
class FlexGenTimes:
    """Rows of the linear model: a time is the largest of ``row @ shares``.

    ``prefill`` and ``decode`` are seconds of one layer of one step of the whole block. A decode row
    already has what nothing hides, the loads.
    """

    job: FlexGenJob
    prefill: tuple[Row, ...]
    decode: tuple[Row, ...]

    def prefill_layer_s(self, shares: Row) -> float:
        """T_pre of papers.md 3.3."""
        return max(float(row @ shares) for row in self.prefill)

    def decode_layer_s(self, shares: Row) -> float:
        """T_gen of papers.md 3.3."""
        return max(float(row @ shares) for row in self.decode)

    def block_s(self, shares: Row) -> float:
        """``T_pre L + T_gen (gen_len - 1) L``."""
        steps = self.job.gen_len - 1
        layer_s = self.prefill_layer_s(shares) + steps * self.decode_layer_s(shares)
        return self.job.model.n_layers * layer_s

    def tokens_per_s(self, shares: Row) -> float:
        """Generated tokens over the time of the block, prefill included, as FlexGen reports it."""
        return self.job.n_seqs * self.job.gen_len / self.block_s(shares)


def flexgen_times(job: FlexGenJob, rates: FlexGenRates) -> FlexGenTimes:
    """The formulas of papers.md 3.3 for any model; for OPT they are exactly those."""
    model, s, n, seqs = job.model, job.prompt_len, job.gen_len, job.n_seqs
    layers = range(model.n_layers)
    held = sum(_held_elems(model, i) for i in layers) / model.n_layers
    used = sum(_used_elems(model, i) for i in layers) / model.n_layers
    weights = held * model.weight_bytes_per_elem
    kv = seqs * model.kv_bytes_per_token_layer  # bytes of one token of every sequence
    hidden = seqs * 2.0 * model.d_model
    pair = 2.0 * model.n_heads * (model.qk_dim + model.v_dim) * seqs  # FLOPs per query and key
    half = s + n / 2  # mean context of decode

    weights_in = _row(w_host=weights, w_disk=weights) / rates.h2d_bytes_per_s
    move_h = _row(h_host=hidden, h_disk=hidden)
    h2d_p = weights_in + s * move_h / rates.h2d_bytes_per_s
    d2h_p = _row(kv_host=(s + 1) * kv, kv_disk=(s + 1) * kv) / rates.kv_store_bytes_per_s
    d2h_p = d2h_p + s * move_h / rates.hidden_store_bytes_per_s
    read_p = _row(w_disk=weights, h_disk=s * hidden) / rates.disk_read_bytes_per_s
    write_p = _row(kv_disk=(s + 1) * kv) / rates.kv_write_prefill_bytes_per_s
    write_p = write_p + _row(h_disk=s * hidden) / rates.hidden_write_prefill_bytes_per_s
    compute_p = 2.0 * used * s * seqs / rates.matmul_prefill_flops_per_s
    compute_p += pair * s**2 / rates.attention_prefill_flops_per_s

    h2d_g = weights_in + move_h / rates.h2d_bytes_per_s
    d2h_g = move_h / rates.hidden_store_bytes_per_s
    read_g = _row(kv_disk=half * kv, h_disk=hidden) / rates.disk_read_bytes_per_s
    read_g = read_g + _row(w_disk=weights) / (
        rates.disk_weight_efficiency * rates.disk_read_bytes_per_s
    )
    write_g = _row(kv_disk=kv, h_disk=hidden) / rates.write_decode_bytes_per_s
    compute_g = _constant(2.0 * used * seqs / rates.matmul_decode_flops_per_s)
    on_gpu = pair * half / rates.attention_decode_flops_per_s
    if rates.kv_load_bytes_per_s is None:
        on_cpu = pair * half / _cpu_flops_per_s(job, rates)
        compute_g = compute_g + _row(kv_gpu=on_gpu, kv_host=on_cpu, kv_disk=on_cpu)
    else:
        compute_g = compute_g + _row(kv_gpu=on_gpu, kv_host=on_gpu, kv_disk=on_gpu)
        load = half * kv / rates.kv_load_bytes_per_s
        h2d_g = h2d_g + _row(kv_host=load, kv_disk=load)
    return FlexGenTimes(
        job,
        prefill=(h2d_p + read_p, d2h_p + write_p, _constant(compute_p)),
        decode=tuple(h2d_g + other for other in (d2h_g, read_g, write_g, compute_g)),
    )


def _held_elems(model: ModelSpec, layer: int) -> float:
    experts = model.n_experts * expert_elems(model) if model.is_moe(layer) else 0
    return attention_gemm_elems(model) + dense_mlp_elems(model, layer) + experts


def _used_elems(model: ModelSpec, layer: int) -> float:
    experts = model.top_k * expert_elems(model) if model.is_moe(layer) else 0
    return attention_gemm_elems(model) + dense_mlp_elems(model, layer) + experts


def _row(**coefficients: float) -> Row:
    return np.array([coefficients.get(name, 0.0) for name in SHARES])


def _constant(value: float) -> Row:
    """A row that is ``value`` whatever the shares: those of the KV sum to 1."""
    return _row(kv_gpu=value, kv_host=value, kv_disk=value)


def _cpu_flops_per_s(job: FlexGenJob, rates: FlexGenRates) -> float:
    """Rate of attention on the CPU; small batches and narrow models slow it down (their fit)."""
    if not rates.fitted_cpu:
        return rates.cpu_attention_flops_per_s
    a = max(0.0, math.log2(64 / job.batch_size))
    b = max(0.0, math.log2(4096 / job.model.d_model))
    factor = max(0.1, 1 + 0.0168 * a * b - 0.0328 * a - 0.0621 * b)
    return rates.cpu_attention_flops_per_s * factor
