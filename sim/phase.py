"""``mode=phase``: the best mix of three sources for one decode step of a model on a machine.

The row has the closed form's answer and the constants that a phase diagram is drawn from. What
readers get wrong: the step is one layer's, of a whole block, at constant rates. Only the compute of
the new tokens is the cost model's, with its reads of GPU memory; the boundaries leave those out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from rich.console import Console

from policies.cost.layer_work import LayerWork, layer_work
from policies.cost.model import CostModel
from policies.cost.three_sources import Mix, without_overlap
from policies.placement import ON_GPU, Placement
from policies.plan.op import Kind, Op
from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.model import ModelSpec
from policies.typed import checked, typed, unknown_key
from sim.job import WorkloadSpec
from sim.mode_keys import PHASE
from sim.settings import check_keys, group_of, model_of

WEIGHTS = ("streamed", "resident")


@dataclass(frozen=True, slots=True)
class PhaseCase:
    """What a row answers for: ``weights`` are ``streamed`` once a block or ``resident``."""

    model: ModelSpec
    hardware: HardwareProfile
    n_batches: int
    batch_size: int
    n_ctx: int
    weights: str = "streamed"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"phase.weights: {self.weights!r} is none of {', '.join(WEIGHTS)}")


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A row of ``mode=phase``: seconds are of one layer, bytes and FLOPs as in ``LayerWork``.

    ``gain_*`` is the time without layer inputs (all loaded; the best of load and recompute) over
    that of the mix. ``serial_region`` is the best source where nothing overlaps. The boundaries are
    link bytes per FLOP; None where layer inputs never pay.
    """

    model: str
    n_layers: int
    hardware: str
    weights: str
    n_batches: int
    batch_size: int
    prompt_len: int
    bytes_per_s: float
    flops_per_s: float
    base_s: float
    region: str
    share_kv: float
    share_input: float
    share_recompute: float
    step_s: float
    load_all_s: float
    two_sources_s: float
    gain_over_load_all: float
    gain_over_two_sources: float
    limit: str
    serial_region: str
    kv_bytes: float
    input_bytes: float
    project_flops: float
    linear_flops: float
    pair_flops: float
    weight_bytes: float
    boundary_load_all: float
    boundary_input: float | None
    boundary_recompute: float
    extrapolated: str
    mode: str = "phase"
    status: str = "ok"
    reason: str = ""

    def as_row(self) -> dict[str, object]:
        """Column names and values, in column order."""
        return asdict(self)


def phase_case(config: Mapping[str, object], overrides: Collection[str]) -> PhaseCase:
    """The case that a resolved configuration describes; ``ValueError`` naming what is wrong."""
    check_keys(PHASE, config, overrides)
    data = group_of(config, "workload")
    size = typed("workload.batch_size", int, data.get("batch_size"))
    workload = WorkloadSpec(**checked("workload", WorkloadSpec, data))
    if workload.source != "fixed":
        raise ValueError(f"workload: {workload.name} must be fixed in mode=phase: one length")
    own = group_of(config, "phase")
    for key in own:
        if key != "weights":
            raise ValueError(unknown_key("phase", key, ("weights",)))
    return PhaseCase(
        model=model_of(group_of(config, "model"), overrides),
        hardware=hardware_from_mapping(group_of(config, "hardware")),
        n_batches=workload.n_batches,
        batch_size=cast(int, size),
        n_ctx=workload.prompt_len,
        weights=typed("phase.weights", str, own.get("weights", "streamed")),
    )


def phase_record(case: PhaseCase) -> PhaseRecord:
    """Shares, times and gains of the first decode step.

    Rates: H2D without its latency, and the last measured GEMM rate.
    """
    link, flops_per_s = case.hardware.h2d.bytes_per_s, case.hardware.gemm.y[-1]
    work = layer_work(
        case.model,
        case.n_ctx,
        case.n_batches,
        case.batch_size,
        resident=case.weights == "resident",
    )
    base_s, extrapolated = _base(case)
    mix = work.mix(link, flops_per_s, base_s)
    token, weights_s = work.token_s(link, flops_per_s), work.weight_bytes / link
    serial = without_overlap(token, work.n_ctx, work.n_seqs, weights_s, base_s)
    return _record(case, work, mix, serial, base_s, extrapolated)


def _base(case: PhaseCase) -> tuple[float, str]:
    """Seconds of a layer for the new tokens of all batches, and curves used beyond their range."""
    layers = ((ON_GPU, ON_GPU),) * case.model.n_layers
    costs = CostModel(case.model, case.hardware, Placement(weights=layers, kv=(ON_GPU,)))
    op = Op(Kind.FORWARD, 0, 1, case.model.n_layers - 1, n_seqs=case.batch_size, n_new=1,
            n_ctx=case.n_ctx)  # fmt: skip
    return case.n_batches * costs.seconds(op), " ".join(sorted(costs.extrapolated))


def _record(
    case: PhaseCase, work: LayerWork, mix: Mix, serial: Mix, base_s: float, extrapolated: str
) -> PhaseRecord:
    edges = work.boundaries()
    return PhaseRecord(
        model=case.model.name,
        n_layers=case.model.n_layers,
        hardware=case.hardware.name,
        weights=case.weights,
        n_batches=case.n_batches,
        batch_size=case.batch_size,
        prompt_len=case.n_ctx,
        bytes_per_s=case.hardware.h2d.bytes_per_s,
        flops_per_s=case.hardware.gemm.y[-1],
        base_s=base_s,
        region=mix.region,
        share_kv=mix.shares[0],
        share_input=mix.shares[1],
        share_recompute=mix.shares[2],
        step_s=mix.step_s,
        load_all_s=mix.load_all_s,
        two_sources_s=mix.two_sources_s,
        gain_over_load_all=mix.gain_over_load_all,
        gain_over_two_sources=mix.gain_over_two_sources,
        limit=mix.limit,
        serial_region=serial.region,
        kv_bytes=work.kv_bytes,
        input_bytes=work.input_bytes,
        project_flops=work.project_flops,
        linear_flops=work.linear_flops,
        pair_flops=work.pair_flops,
        weight_bytes=work.weight_bytes,
        boundary_load_all=edges.load_all,
        boundary_input=edges.input,
        boundary_recompute=edges.recompute,
        extrapolated=extrapolated,
    )


def phase_line(label: str, overrides: Sequence[str], record: PhaseRecord) -> str:
    """One line for a run of a sweep."""
    cell = [text for text in overrides if not text.startswith("+experiment=")]
    what = " ".join(cell) or f"{record.model} {record.hardware}"
    return f"#{label} {what}: {said(record)}"


def said(record: PhaseRecord) -> str:
    """The answer in words."""
    shares = zip(
        ("KV loaded", "layer inputs loaded", "recomputed"),
        (record.share_kv, record.share_input, record.share_recompute),
        strict=True,
    )
    mix = ", ".join(f"{share:.1%} {words}" for words, share in shares if share > 0)
    return (
        f"{mix}; {record.gain_over_load_all:.2f}x over loading all, "
        f"{record.gain_over_two_sources:.2f}x over load and recompute"
    )


def print_phase(record: PhaseRecord, console: Console) -> None:
    """Print the answer of one case."""
    block = f"{record.n_batches} batches of {record.batch_size}, {record.prompt_len} cached tokens"
    console.print(f"[bold]{record.model} on {record.hardware}[/bold], {block}, "
                  f"weights {record.weights}", highlight=False)  # fmt: skip
    console.print(f"best mix: {said(record)}", highlight=False)
    console.print(
        f"a layer takes {1e3 * record.step_s:.2f} ms, limit {record.limit}; all loaded "
        f"{1e3 * record.load_all_s:.2f} ms, load and recompute {1e3 * record.two_sources_s:.2f} ms",
        highlight=False,
    )
