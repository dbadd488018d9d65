"""The record of a serving run: one flat row, computed from the run's two logs.

Times of a request: TTFT from arrival to first token (queueing included), TPOT between later tokens.
What readers get wrong: ``transfer_overhead`` is the total of loads over the total of compute, as
the kappa paper's POH; with overlap its time share of the makespan is ``h2d_busy``, not
``transfer_share``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from policies.cost.kappa import prefill_flops_per_token, transfer_share
from policies.spec.model import ModelSpec
from sim.fleet import ServeRun, ServeSpec
from sim.power import PowerModel
from sim.sessions import Sessions

Values = NDArray[np.float64]
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass(frozen=True, slots=True)
class Targets:
    """Service level: a request counts in goodput if it meets both."""

    ttft_s: float = 5.0
    tpot_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"serve.slo_{name}: {getattr(self, name)} must be > 0")


@dataclass(frozen=True, slots=True)
class ServeRecord:
    """One row; units are in the names, None means not applicable.

    ``n_new_*``, ``n_history_*`` and ``kappa_ratio_p50`` describe the workload: T, the tokens before
    it, and their ratio. ``scheduled_tokens_*`` are new prefill tokens per iteration (with decode:
    per iteration that prefills), ``scheduled_tokens_bound`` is ``capacity * sum(T) / sum(K + T)``,
    what memory allows on average if every request holds it for one iteration. Watts are of one GPU.
    """

    model: str
    n_layers: int
    hardware: str
    workload: str
    admission: str
    prefix: str
    routing: str
    arrivals: str
    mode: str = "serve"
    status: str = "ok"
    reason: str = ""
    rate_per_s: float | None = None
    n_machines: int = 1
    n_requests: int | None = None
    n_rejected: int | None = None
    n_cut: int | None = None
    n_too_long: int | None = None
    n_preempted: int | None = None
    capacity_tokens: int | None = None
    budget_tokens: int | None = None
    makespan_s: float | None = None
    n_iterations: int | None = None
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_mean_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p90_s: float | None = None
    tpot_p99_s: float | None = None
    queue_mean_s: float | None = None
    queue_p50_s: float | None = None
    queue_p90_s: float | None = None
    queue_p99_s: float | None = None
    requests_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    goodput_per_s: float | None = None
    slo_share: float | None = None
    scheduled_tokens_mean: float | None = None
    scheduled_tokens_first_half: float | None = None
    scheduled_tokens_bound: float | None = None
    budget_use: float | None = None
    n_new_mean: float | None = None
    n_new_p50: float | None = None
    n_new_p90: float | None = None
    n_history_mean: float | None = None
    n_history_p50: float | None = None
    n_history_p90: float | None = None
    kappa_ratio_p50: float | None = None
    transfer_overhead: float | None = None
    transfer_share: float | None = None
    gpu_busy: float | None = None
    h2d_busy: float | None = None
    d2h_busy: float | None = None
    disk_busy: float | None = None
    hit_rate: float | None = None
    recompute_share: float | None = None
    load_bytes: float | None = None
    store_bytes: float | None = None
    disk_read_bytes: float | None = None
    disk_write_bytes: float | None = None
    held_share_mean: float | None = None
    power_mean_watts: float | None = None
    power_max_watts: float | None = None
    energy_joules: float | None = None
    energy_per_token_joules: float | None = None
    max_overtaken: int | None = None
    extrapolated: str = ""
    oom_tier: str = ""
    need_bytes: int | None = None
    have_bytes: int | None = None
    engine: str = "simpy"
    seed: int = 0

    def as_row(self) -> dict[str, object]:
        """Column names and values, in column order."""
        return asdict(self)


def base_record(spec: ServeSpec, workload: str) -> ServeRecord:
    """What is known before the run."""
    return ServeRecord(
        model=spec.model.name,
        n_layers=spec.model.n_layers,
        hardware="+".join(machine.name for machine in spec.machines),
        workload=workload,
        admission=spec.admission.name,
        prefix=spec.prefix.name,
        routing=spec.routing.name if len(spec.machines) > 1 else "",
        arrivals=spec.arrivals.mode,
        rate_per_s=spec.arrivals.rate if spec.arrivals.mode in ("poisson", "open") else None,
        n_machines=len(spec.machines),
        budget_tokens=spec.options.budget_tokens,
        seed=spec.seed,
    )


def summarise(
    spec: ServeSpec,
    sessions: Sessions,
    run: ServeRun,
    base: ServeRecord,
    targets: Targets,
    power: tuple[PowerModel, ...],
) -> ServeRecord:
    """The row of a run that took place; ``power`` has one model a machine."""
    columns: dict[str, object] = {
        "n_requests": run.requests.n_rows,
        "n_rejected": run.n_rejected,
        "n_cut": sessions.n_cut,
        "n_too_long": _n_too_long(spec.model, sessions),
        "capacity_tokens": sum(run.capacity_tokens),
        "makespan_s": run.end_s,
        "n_iterations": run.iterations.n_rows,
        "extrapolated": " ".join(run.extrapolated),
        **_workload_columns(sessions),
    }
    if run.requests.n_rows == 0:
        reason = f"all {run.n_rejected} requests exceed the memory of {run.capacity_tokens} tokens"
        return _amend(base, **columns, status="infeasible", reason=reason)
    columns |= _request_columns(run, targets)
    columns |= _schedule_columns(spec, run)
    columns |= _lane_columns(spec, run)
    columns |= _power_columns(spec, run, power)
    return _amend(base, **columns)


def _amend(record: ServeRecord, **columns: object) -> ServeRecord:
    return replace(record, **columns)  # type: ignore[arg-type]


def _n_too_long(model: ModelSpec, sessions: Sessions) -> int:
    limit = model.max_positions
    return sum(t.n_history + t.n_prompt + t.n_response - 1 > limit for t in sessions.turns)


def _workload_columns(sessions: Sessions) -> dict[str, object]:
    """Statistics of all turns as the workload has them: T, history, and their ratio."""
    new = np.array([turn.n_prompt for turn in sessions.turns], dtype=np.float64)
    history = np.array([turn.n_history for turn in sessions.turns], dtype=np.float64)
    columns: dict[str, object] = {"kappa_ratio_p50": float(np.median(history / new))}
    for name, values in (("n_new", new), ("n_history", history)):
        columns[f"{name}_mean"] = float(values.mean())
        columns[f"{name}_p50"] = float(np.quantile(values, 0.5))
        columns[f"{name}_p90"] = float(np.quantile(values, 0.9))
    return columns


def _spread(name: str, values: Values) -> dict[str, object]:
    """Mean and quantiles; None where there is no value."""
    if not len(values):
        return {}
    spread: dict[str, object] = {f"{name}_mean_s": float(values.mean())}
    for suffix, quantile in _QUANTILES:
        spread[f"{name}_{suffix}_s"] = float(np.quantile(values, quantile))
    return spread


def _request_columns(run: ServeRun, targets: Targets) -> dict[str, object]:
    table = run.requests
    arrival, first = table.column("arrival_s"), table.column("first_token_s")
    n_out, end = table.column("n_out"), table.column("end_s")
    ttft = first - arrival
    several = n_out > 1
    tpot = np.zeros(len(ttft))
    tpot[several] = (end - first)[several] / (n_out - 1)[several]
    met = (ttft <= targets.ttft_s) & (tpot <= targets.tpot_s)
    new, cached = table.column("n_prefill"), table.column("n_cached")
    return {
        **_spread("ttft", ttft),
        **_spread("tpot", tpot[several]),
        **_spread("queue", table.column("admitted_s") - arrival),
        "requests_per_s": len(ttft) / run.end_s,
        "prefill_tokens_per_s": float(new.sum()) / run.end_s,
        "decode_tokens_per_s": float((n_out - 1).sum()) / run.end_s if several.any() else None,
        "goodput_per_s": float(met.sum()) / run.end_s,
        "slo_share": float(met.mean()),
        "hit_rate": run.n_hit / run.n_history if run.n_history else None,
        "max_overtaken": int(table.column("max_overtaken").max()),
        "scheduled_tokens_bound": (
            sum(run.capacity_tokens) * float(new.sum()) / float((cached + new).sum())
        ),
    }


def _schedule_columns(spec: ServeSpec, run: ServeRun) -> dict[str, object]:
    table = run.iterations
    new, recomputed = table.column("n_prefill_tokens"), table.column("n_recompute_tokens")
    decoded, seconds = table.column("n_decode"), table.column("seconds")
    prefills = new[new + recomputed > 0]
    half = prefills[: max(1, len(prefills) // 2)]
    rows = new + recomputed + decoded
    cached = float(run.requests.column("n_cached").sum())
    held = table.column("n_held_tokens") * seconds
    capacity = np.array(run.capacity_tokens)[table.column("server").astype(int)]
    return {
        "scheduled_tokens_mean": float(prefills.mean()),
        "scheduled_tokens_first_half": float(half.mean()),
        "budget_use": float(rows.mean()) / spec.options.budget_tokens,
        "n_preempted": int(table.column("n_preempted").sum()),
        "recompute_share": float(recomputed.sum()) / cached if cached else 0.0,
        "held_share_mean": float(held.sum() / (capacity * seconds).sum()),
    }


def _lane_columns(spec: ServeSpec, run: ServeRun) -> dict[str, object]:
    table, model = run.iterations, spec.model
    total_s = run.end_s * len(spec.machines)
    compute_s, load_s = table.column("compute_s").sum(), table.column("load_s").sum()
    overhead = float(load_s / compute_s) if compute_s else 0.0
    stored = table.column("n_store_tokens")
    server = table.column("server").astype(int)
    d2h = np.array([machine.d2h.bytes_per_s for machine in spec.machines])[server]
    latency = np.array([machine.d2h.latency_s for machine in spec.machines])[server]
    kv = model.kv_bytes_per_token
    store_s = (stored * kv / d2h + (stored > 0) * model.n_layers * latency).sum()
    block_bytes = run.block_tokens * kv
    return {
        "transfer_overhead": overhead,
        "transfer_share": transfer_share(overhead),
        "gpu_busy": float(compute_s) / total_s,
        "h2d_busy": float(load_s) / total_s,
        "d2h_busy": float(store_s) / total_s,
        "disk_busy": float(table.column("disk_s").sum()) / total_s,
        "load_bytes": float(table.column("n_load_tokens").sum()) * kv,
        "store_bytes": float(stored.sum()) * kv,
        "disk_read_bytes": float(table.column("n_disk_tokens").sum()) * kv,
        "disk_write_bytes": run.counts["n_demoted"] * block_bytes,
    }


def _power_columns(
    spec: ServeSpec, run: ServeRun, power: tuple[PowerModel, ...]
) -> dict[str, object]:
    """Watts per GPU, energy of all machines.

    The best FLOP rate is that of the GEMM curve before any power cap lowered it, so a capped
    machine draws its cap at most.
    """
    table = run.iterations
    server = table.column("server").astype(int)
    start, busy, load = (table.column(n) for n in ("start_s", "compute_s", "load_s"))
    rows: Values = np.zeros(table.n_rows)
    for name in ("n_prefill_tokens", "n_recompute_tokens", "n_decode"):
        rows = rows + table.column(name)
    flops = rows * prefill_flops_per_token(spec.model)
    watts, most, n_gpus = 0.0, 0.0, sum(machine.n_gpus for machine in spec.machines)
    for index, (machine, model) in enumerate(zip(spec.machines, power, strict=True)):
        own = server == index
        flops_s = flops[own] / model.best_flops_per_s
        mean, highest = model.over(start[own], busy[own], flops_s, load[own], run.end_s)
        watts += mean
        most = max(most, highest / machine.n_gpus)
    requests = run.requests
    tokens = float(requests.column("n_prefill").sum() + requests.column("n_out").sum())
    return {
        "power_mean_watts": watts / n_gpus,
        "power_max_watts": most,
        "energy_joules": watts * run.end_s,
        "energy_per_token_joules": watts * run.end_s / tokens,
    }
