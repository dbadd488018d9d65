"""The variants of kappa_crit for one model and machine, each with its name and its reason.

A kappa_crit is a ratio of four numbers that all have several defensible values, so one number alone
says little. What readers get wrong: "what would change" rows keep everything else fixed, also where
a real machine with that link would have another GPU (register 6).
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.cost.kappa import Kappa, kappa_of
from policies.cost.kappa_paper import SUSTAINED_BYTES_PER_S, TABLE_1
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.peaks import peak_of

_LATENT_ELEMS = 512 + 64  # per token and layer, DeepSeek's latent and its rotary part
LINKS = (  # one way, bytes per second; what the source says of each
    ("PCIe 4 x16", 32e9, "peak"),
    ("PCIe 5 x16", 64e9, "peak"),
    ("NVLink-C2C, paper", 900e9, "both ways counted one way"),
    ("NVLink-C2C, physical", 450e9, "one way"),
    ("NVLink-C2C, measured", 150e9, "software-limited reports, 135 to 150 GB/s"),
    ("unified HBM", 8e12, "the paper's what-if"),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A named kappa; ``note`` says what is different about it."""

    name: str
    kappa: Kappa
    note: str


def variants(model: ModelSpec, hardware: HardwareProfile, n_ctx: int) -> list[Variant]:
    """Peak and measured rates, context term off and on, and the paper's own arithmetic."""
    link, compute = hardware.h2d.bytes_per_s, max(hardware.gemm.y)
    found = [
        Variant("measured", kappa_of(model, link, compute), "the profile's link and GEMM rate"),
        Variant(
            "measured, with context",
            kappa_of(model, link, compute, context="exact", n_ctx=n_ctx),
            f"attention over {n_ctx:,} tokens in F_pfl",
        ),
        Variant(
            "measured, with LM head",
            kappa_of(model, link, compute, count="layers+head"),
            "as if every token were sampled",
        ),
        Variant(
            "measured, 2N",
            kappa_of(model, link, compute, count="2N"),
            "F_pfl of twice the active parameters, embeddings included",
        ),
    ]
    peak = peak_of(hardware.name)
    if peak is not None:
        found.append(
            Variant(
                "peak, FP16",
                kappa_of(model, peak.link_bytes_per_s, peak.fp16_flops_per_s),
                f"{peak.link}, dense FP16 peak",
            )
        )
        if peak.fp8_flops_per_s:
            found.append(
                Variant(
                    "peak, FP8",
                    kappa_of(model, peak.link_bytes_per_s, peak.fp8_flops_per_s),
                    f"{peak.link}, dense FP8 peak: the paper's choice",
                )
            )
    printed = TABLE_1.get(model.name)
    if printed is not None and peak is not None and peak.fp8_flops_per_s:
        n_gpus = hardware.n_gpus
        found.append(
            Variant(
                "paper",
                printed.kappa(peak.link_bytes_per_s / n_gpus, peak.fp8_flops_per_s / n_gpus),
                "nominal 2N, peaks of one GPU",
            )
        )
        found.append(
            Variant(
                "paper, 15 GB/s",
                printed.kappa(SUSTAINED_BYTES_PER_S, peak.fp8_flops_per_s / n_gpus),
                "the rate sustained by eight GPUs over the peak of one",
            )
        )
    return found


def what_if(model: ModelSpec, hardware: HardwareProfile) -> list[Variant]:
    """Other links and other caches beside the machine's measured compute, all else fixed."""
    compute, link = max(hardware.gemm.y), hardware.h2d.bytes_per_s
    found = [
        Variant(name, kappa_of(model, rate * hardware.n_gpus, compute), note)
        for name, rate, note in LINKS
    ]
    width = model.kv_elems_per_token_layer * model.n_layers
    caches = [
        ("KV in INT8", width * 1.0, "one byte an element"),
        ("KV in FP4", width * 0.5, "half a byte an element"),
    ]
    if not model.kv_latent_dim:
        latent = _LATENT_ELEMS * model.n_layers
        caches += [
            ("MLA cache", latent * model.kv_bytes_per_elem, f"{_LATENT_ELEMS} elements a layer"),
            ("MLA cache in FP4", latent * 0.5, "both"),
        ]
    found += [
        Variant(name, kappa_of(model, link, compute, kv_bytes_per_token=nbytes), note)
        for name, nbytes, note in caches
    ]
    return found
