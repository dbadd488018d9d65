"""The record of a run: one flat row, the same columns whatever happened.

A run that does not fit is a row with status ``oom`` and the tier, need and have of what was
missing; its measured columns are empty, never zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One row of ``results.csv``; units are in the names, None means not applicable.

    ``prompt_len`` and ``gen_len`` are the longest of the job, ``batch_size`` the largest batch.
    ``limit`` and ``max_new`` are the caps that were asked for, ``n_cut`` how many responses the
    second cut. ``*_busy`` are shares of the makespan in which a lane works, ``wait_*`` the shares
    that the critical path spends on it (they sum to 1). ``weights_*`` and ``kv_*`` are effective
    placements; ``inputs_share`` of the tokens with a home are kept there as layer inputs.

    ``n_load_mean`` to ``n_resident_mean`` say where the cached tokens of a batch come from in a
    decode step, on average over batches and steps: KV loaded, layer inputs projected, recomputed,
    KV attended on the CPU, KV that stays on the GPU. They sum to the context.

    ``feedback`` says whether the loop was closed, ``feedback_belief_changes`` how often a decision
    was taken under another belief than the one before.
    """

    policy: str
    model: str
    n_layers: int
    hardware: str
    workload: str
    status: str = "ok"
    reason: str = ""
    n_requests: int | None = None
    n_rejected: int | None = None
    n_too_long: int | None = None
    n_cut: int | None = None
    limit: int | None = None
    max_new: int | None = None
    padding_waste: float | None = None
    prompt_len: int | None = None
    gen_len: int | None = None
    batch_size: int | None = None
    n_batches: int | None = None
    n_blocks: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    makespan_s: float | None = None
    gpu_busy: float | None = None
    h2d_busy: float | None = None
    d2h_busy: float | None = None
    disk_busy: float | None = None
    cpu_busy: float | None = None
    bottleneck: str = ""
    wait_h2d_weights: float | None = None
    wait_h2d_kv: float | None = None
    wait_d2h: float | None = None
    wait_disk: float | None = None
    wait_compute: float | None = None
    wait_host: float | None = None
    wait_sync: float | None = None
    peak_gpu_bytes: int | None = None
    peak_host_bytes: int | None = None
    peak_disk_bytes: int | None = None
    weights_gpu: float | None = None
    weights_host: float | None = None
    weights_disk: float | None = None
    kv_gpu: float | None = None
    kv_host: float | None = None
    kv_disk: float | None = None
    inputs_share: float | None = None
    n_load_mean: float | None = None
    n_project_mean: float | None = None
    n_recompute_mean: float | None = None
    n_cpu_mean: float | None = None
    n_resident_mean: float | None = None
    lower_bound_s: float | None = None
    bound_ratio: float | None = None
    extrapolated: str = ""
    solver: str = ""
    solve_s: float | None = None
    feedback: bool | None = None
    feedback_belief_changes: int | None = None
    oom_tier: str = ""
    need_bytes: int | None = None
    have_bytes: int | None = None
    n_ops: int | None = None
    trace: str = ""
    engine: str = "simpy"
    seed: int = 0

    def as_row(self) -> dict[str, object]:
        """Column names and values, in column order."""
        return asdict(self)
