"""kappa_crit found by the simulator: bisection on K for the point where load and compute are equal.

One request with K cached and T new tokens is served; the run's log says how long loads and compute
took. Under the formula's conditions (constant rates, no latency, no floor, no context term, no LM
head) the two agree; with the machine's measured curves they do not, and the difference is what the
formula leaves out. What readers get wrong: at small T the measured point is far *above* the
formula's, because compute does not get shorter in proportion.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from policies.cost.kappa import Kappa, advise, kappa_of
from policies.cost.kappa_paper import TABLE_1
from policies.cost.ragged import constant_rates
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.peaks import peak_of
from sim.arrivals import Arrivals
from sim.fleet import ServeSpec, serve
from sim.serve_options import ServeOptions
from sim.sessions import Sessions, Turn

N_NEW = (64, 512, 4096)  # new tokens at which the measured curves are searched
FORMULA_N_NEW = 8192
_MOST = 2**26  # cached tokens at which a search gives up


@dataclass(frozen=True, slots=True)
class KappaRecord:
    """A row of ``mode=kappa``; None where a search found no crossing or no peak is known."""

    model: str
    n_layers: int
    hardware: str
    mode: str = "kappa"
    status: str = "ok"
    reason: str = ""
    flops_per_token: float | None = None
    kv_bytes_per_token: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    kappa_model: float | None = None
    kappa_hardware: float | None = None
    kappa_crit: float | None = None
    kappa_crit_simulated: float | None = None
    simulated_deviation: float | None = None
    kappa_crit_peak: float | None = None
    kappa_crit_paper: float | None = None
    kappa_crit_t64: float | None = None
    kappa_crit_t512: float | None = None
    kappa_crit_t4096: float | None = None
    recompute_gain_bound: float | None = None
    load_all: bool | None = None

    def as_row(self) -> dict[str, object]:
        """Column names and values, in column order."""
        return asdict(self)


def serve_one(
    model: ModelSpec, hardware: HardwareProfile, options: ServeOptions, n_cached: int, n_new: int
) -> tuple[float, float]:
    """Seconds of load and of compute (LM head included) of a request alone on a machine."""
    turn = Turn(0, n_cached, n_new, 1)
    sessions = Sessions("one request", (turn,), (turn,), False, None)
    spec = ServeSpec(model, (hardware,), options, Arrivals(mode="backlog"))
    run = serve(spec, sessions)
    return (
        float(run.iterations.column("load_s").sum()),
        float(run.iterations.column("compute_s").sum()),
    )


def bare_options(n_cached: int, n_new: int) -> ServeOptions:
    """The formula's conditions, and memory and budget for one request."""
    return ServeOptions(
        budget_tokens=n_new,
        capacity_tokens=n_cached + n_new,
        prefill_only=True,
        overlap=False,
        write_back=False,
        attention=False,
        lm_head=False,
    )


def search(model: ModelSpec, hardware: HardwareProfile, n_new: int) -> float | None:
    """``K / T`` at which loads take as long as compute; None beyond 2^26 cached tokens.

    K is the smallest whole number with load >= compute, so the ratio is within 1 / T of the
    crossing.
    """

    def bound(n_cached: int) -> bool:
        load_s, compute_s = serve_one(
            model, hardware, bare_options(n_cached, n_new), n_cached, n_new
        )
        return load_s >= compute_s

    high = 1
    while not bound(high):
        high *= 2
        if high > _MOST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if bound(middle):
            high = middle
        else:
            low = middle
    return high / n_new


def kappa_record(model: ModelSpec, hardware: HardwareProfile) -> KappaRecord:
    """Formula, simulator and paper side by side."""
    flops_per_s, bytes_per_s = max(hardware.gemm.y), hardware.h2d.bytes_per_s
    kappa = kappa_of(model, bytes_per_s, flops_per_s)
    found = search(model, constant_rates(hardware, flops_per_s, bytes_per_s), FORMULA_N_NEW)
    peak, printed = peak_of(hardware.name), TABLE_1.get(model.name)
    at_peak = paper = None
    if peak is not None:
        at_peak = kappa_of(model, peak.link_bytes_per_s, peak.fp16_flops_per_s).kappa_crit
        if printed is not None and peak.fp8_flops_per_s:
            paper = _of_one(printed.kappa(peak.link_bytes_per_s, peak.fp8_flops_per_s))
    measured = {n: search(model, hardware, n) for n in N_NEW}
    return KappaRecord(
        model=model.name,
        n_layers=model.n_layers,
        hardware=hardware.name,
        flops_per_token=kappa.flops_per_token,
        kv_bytes_per_token=kappa.kv_bytes_per_token,
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        kappa_model=kappa.kappa_model,
        kappa_hardware=kappa.kappa_hardware,
        kappa_crit=kappa.kappa_crit,
        kappa_crit_simulated=found,
        simulated_deviation=found / kappa.kappa_crit - 1.0 if found is not None else None,
        kappa_crit_peak=at_peak,
        kappa_crit_paper=paper,
        kappa_crit_t64=measured[64],
        kappa_crit_t512=measured[512],
        kappa_crit_t4096=measured[4096],
        recompute_gain_bound=kappa.recompute_gain_bound,
        load_all=advise(kappa).load_all,
    )


def _of_one(kappa: Kappa) -> float:
    """The ratio of a group's rates is that of one GPU's."""
    return kappa.kappa_crit
