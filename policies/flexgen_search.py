"""FlexGen's placement search: a linear program for given batches, and a search over batches.

Weights, KV and activations are cut into shares on GPU, host and disk so that the time of a block,
by ``policies.cost.flexgen_model``, is least and every tier holds what it is given (papers.md 3.3).
What readers get wrong: the shares are continuous and tensors are not. The percentages that come out
are rounded to whole tensors when FlexGen honours them, and what fitted may then not fit any more;
``PlacementSearch`` leaves room in the tier that is too full until it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from policies.cost.flexgen_model import SHARES, FlexGenJob, FlexGenRates, FlexGenTimes, Row
from policies.cost.flexgen_model import flexgen_times as times_of
from policies.cost.flops import gemm_flops
from policies.errors import OutOfMemory
from policies.flexgen import FlexGen
from policies.placement import ON_GPU, Placement, Shares, flexgen_placement
from policies.plan.memory import Pool, block_pools, check_run, run_pools
from policies.plan.op import Attention, Scope, Tier
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block

LESS_ROOM = 0.93  # of what a tier may hold, each time that its rounded placement did not fit
TRIES = 12
BATCH_SIZES = (1, 2, 3, 4, *range(8, 129, 8), *range(160, 1025, 32))
_TIERS = ("gpu", "host", "disk")
_LESS_THAN_A_TENSOR = 1e-6
_TIE_BREAK = 1e-5  # of the block time with everything on the host


@dataclass(frozen=True, slots=True)
class Found:
    """A placement as FlexGen's six percentages, and what its cost model promises of it."""

    job: FlexGenJob
    percent: tuple[float, ...]
    shares: tuple[float, ...]
    block_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the block, prefill included."""
        return self.job.n_seqs * self.job.gen_len / self.block_s


def rates_of(hardware: HardwareProfile, job: FlexGenJob, policy: FlexGen) -> FlexGenRates:
    """The rates of FlexGen's model on a machine that has a profile instead of a fit.

    A rate is that of the job's mean kernel: GEMMs of one batch, floored by reading the weights;
    attention by context. KV that is pageable crosses host copy and link one after the other.
    """
    model, s, half = job.model, job.prompt_len, job.prompt_len + job.gen_len / 2
    loads = job.model.kv_bytes_per_token_layer
    pair = 2.0 * model.n_heads * (model.qk_dim + model.v_dim)
    pinned = policy.kv_pinned
    relay = 1 / (1 / hardware.host_copy.bytes_per_s + 1 / hardware.h2d.bytes_per_s)
    store = 1 / (1 / hardware.host_copy.bytes_per_s + 1 / hardware.d2h.bytes_per_s)
    on_cpu = policy.schedule.attention is Attention.CPU

    def gemm(rows: int) -> float:
        flops = gemm_flops(model, model.n_layers - 1, Scope.LAYER, rows)
        floor_s = model.layer_bytes(model.n_layers - 1) / hardware.hbm_bytes_per_s
        return flops / max(flops / hardware.gemm(rows), floor_s)

    return FlexGenRates(
        h2d_bytes_per_s=hardware.h2d.bytes_per_s,
        kv_store_bytes_per_s=hardware.d2h.bytes_per_s if pinned else store,
        hidden_store_bytes_per_s=hardware.d2h.bytes_per_s,
        disk_read_bytes_per_s=hardware.disk_read.bytes_per_s,
        kv_write_prefill_bytes_per_s=hardware.disk_write.bytes_per_s,
        hidden_write_prefill_bytes_per_s=hardware.disk_write.bytes_per_s,
        write_decode_bytes_per_s=hardware.disk_write.bytes_per_s,
        matmul_prefill_flops_per_s=gemm(job.batch_size * s),
        matmul_decode_flops_per_s=gemm(job.batch_size),
        attention_prefill_flops_per_s=hardware.attention_prefill(s),
        attention_decode_flops_per_s=hardware.attention_decode(half) * pair / loads,
        cpu_attention_flops_per_s=hardware.cpu_attention_bytes_per_s * pair / loads,
        kv_load_bytes_per_s=None if on_cpu else hardware.h2d.bytes_per_s if pinned else relay,
    )


class PlacementSearch:
    """Placements of one model on one machine; ``policy``'s own placement is ignored.

    ``policy`` says what is pinned and where attention runs. ``rates`` None: those of ``hardware``.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        model: ModelSpec,
        policy: FlexGen,
        rates: FlexGenRates | None = None,
    ) -> None:
        self.hardware, self.model, self.policy, self.rates = hardware, model, policy, rates
        self._weights = np.stack([self._weight_bytes(tier) for tier in _TIERS], axis=1)

    def relaxed(self, job: FlexGenJob, room: Row | None = None) -> Found | None:
        """The program's optimum; its percentages may not fit once tensors are whole.

        ``room`` (3,) is the share of GPU, host and disk that may be used. None where nothing fits.
        """
        rates = rates_of(self.hardware, job, self.policy) if self.rates is None else self.rates
        times = times_of(job, rates)
        room = np.ones(len(_TIERS)) if room is None else room
        shares = _solve(times, self._memory(job), room, self.policy)
        if shares is None:
            return None
        return Found(job, _percent(shares), tuple(shares.tolist()), times.block_s(shares))

    def best(self, job: FlexGenJob) -> Found | None:
        """The placement of least block time that runs; None where ``TRIES`` do not find one."""
        room = np.ones(len(_TIERS))
        for _ in range(TRIES):
            found = self.relaxed(job, room)
            full = self._full_tier(job, found.percent) if found else None
            if found is None or full is None:
                return found
            room[_TIERS.index(full)] *= LESS_ROOM
        return None

    def over_batches(
        self,
        prompt_len: int,
        gen_len: int,
        sizes: Sequence[int] = BATCH_SIZES,
        max_batches: int = 16,
    ) -> Found | None:
        """The best placement over batch sizes and numbers of batches, by tokens per second.

        Per batch size, batches are added until throughput drops; sizes grow until one batch no
        longer runs.
        """
        best: Found | None = None
        for size in sizes:
            last: Found | None = None
            for n_batches in range(1, max_batches + 1):
                found = self.best(FlexGenJob(self.model, prompt_len, gen_len, size, n_batches))
                if found is None or (last and found.tokens_per_s < last.tokens_per_s):
                    break
                last = found
            if last is None:
                break
            if best is None or last.tokens_per_s > best.tokens_per_s:
                best = last
        return best

    # ---- memory ---------------------------------------------------------------------------

    def _weight_bytes(self, where: str) -> Row:
        """Bytes per tier of weights, and the slots that they need, if all lie in ``where``."""
        share = _all_in(where)
        placement = Placement(((share, share),) * self.model.n_layers, (ON_GPU,))
        return _per_tier(run_pools(self.model, placement, self.policy.buffers))

    def _memory(self, job: FlexGenJob) -> _Memory:
        """What each tier holds, read off the memory plan at the corners of the shares.

        The plan is linear in the shares as long as all layers have the same, so corners say all.
        """

        def held(kv: str, act: str) -> Row:
            weights = ((ON_GPU, ON_GPU),) * self.model.n_layers
            placement = Placement(weights, (_all_in(kv),), _all_in(act))
            return _per_tier(block_pools(self.model, placement, self.policy.buffers, _block(job)))

        kv = np.stack([held(tier, "gpu") for tier in _TIERS], axis=1)
        act = np.stack([held("gpu", tier) for tier in ("gpu", "host", "host")], axis=1)
        # Each group of shares sums to 1: two of the three corners hold the block's fixed bytes.
        rows = np.hstack([self._weights, kv, act])
        have = np.array([self.hardware.usable_bytes(tier) for tier in _TIERS])
        return _Memory(rows, -kv[:, 0], have)

    def _full_tier(self, job: FlexGenJob, percent: tuple[float, ...]) -> str | None:
        """The tier that does not hold what rounding to whole tensors gives it; None if all do."""
        blocks = (_block(job),)
        placement = flexgen_placement(self.model, blocks, percent)
        try:
            check_run(self.model, self.hardware, placement, self.policy.buffers, blocks)
        except OutOfMemory as error:
            return error.tier
        return None


def _all_in(where: str) -> Shares:
    return Shares(*(float(tier == where) for tier in _TIERS))


def _per_tier(pools: list[Pool]) -> Row:
    return np.array([sum(p.nbytes for p in pools if p.tier is Tier(t)) for t in _TIERS], float)


# ---- the program ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Memory:
    """``rows @ shares + fixed_bytes <= room * have_bytes`` per tier."""

    rows: NDArray[np.float64]  # (3, 9)
    fixed_bytes: Row  # (3,)
    have_bytes: Row  # (3,)


def _block(job: FlexGenJob) -> Block:
    return Block(0, (Batch(job.batch_size, job.prompt_len),) * job.n_batches, job.gen_len)


def _solve(times: FlexGenTimes, memory: _Memory, room: Row, policy: FlexGen) -> Row | None:
    """Shares (9,) of least block time; None where nothing fits.

    Variables are the shares, T_pre and T_gen; both times are bounded below by their rows.
    """
    job, n = times.job, len(SHARES)
    objective = np.zeros(n + 2)
    objective[n:] = job.model.n_layers * np.array([1.0, job.gen_len - 1.0])
    on_host = np.array([float(name.endswith("host")) for name in SHARES])
    for name in ("w_disk", "kv_disk"):  # of placements as fast as each other, not the one on disk
        objective[SHARES.index(name)] = _TIE_BREAK * times.block_s(on_host)
    prefill = [np.append(row, (-1.0, 0.0)) for row in times.prefill]
    decode = [np.append(row, (0.0, -1.0)) for row in times.decode]
    # In units of the tier, so that bytes and seconds are of the same order.
    scale = np.maximum(memory.have_bytes, 1.0)
    held = np.hstack([memory.rows / scale[:, None], np.zeros((3, 2))])
    free = (room * memory.have_bytes - memory.fixed_bytes) / scale
    sums = np.zeros((3, n + 2))
    for group in range(3):
        sums[group, 3 * group : 3 * group + 3] = 1.0
    bounds = [(0.0, 1.0)] * n + [(0.0, None)] * 2
    bounds[SHARES.index("h_disk")] = (0.0, 0.0)
    if policy.schedule.attention is Attention.CPU:
        bounds[SHARES.index("kv_gpu")] = (0.0, 0.0)
    found = linprog(
        objective,
        A_ub=np.vstack([*prefill, *decode, held]),
        b_ub=np.concatenate([np.zeros(len(prefill) + len(decode)), free]),
        A_eq=sums,
        b_eq=np.ones(3),
        bounds=bounds,
        method="highs",
    )
    return None if found.status != 0 or found.x is None else np.asarray(found.x[:n])


def _percent(shares: Row) -> tuple[float, ...]:
    """Six percentages with two digits; what is left of a pair goes to the disk."""
    out: list[float] = []
    for gpu, host, disk in shares.reshape(3, 3).tolist():
        on_gpu = int(1e4 * gpu + 1e-6) / 100  # rounded down: GPU memory is what is short
        rest = round(100.0 - on_gpu, 2)
        on_host = rest if disk < _LESS_THAN_A_TENSOR else min(rest, int(1e4 * host + 1e-6) / 100)
        out += [on_gpu, on_host]
    return tuple(out)
