"""``python -m sim.kappa model=NAME hardware=NAME``: when is a cached prefix transfer-bound?

Prints kappa_M, kappa_HW and kappa_crit in every variant and what other links and caches would
change. Nothing is simulated here; ``+experiment=kappa`` finds kappa_crit with the simulator.
"""

from __future__ import annotations

import os
import sys
from typing import cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from policies.cost.kappa import advise, context_flops_per_token, prefill_flops_per_token
from policies.cost.kappa_report import Variant, variants, what_if
from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.model import ModelSpec
from sim.__main__ import CONF, WorkingFolder
from sim.report import gib, rate
from sim.settings import explain, group_of, model_of

CONTEXT_TOKENS = 65_536  # context at which the term that the paper drops is shown


def report(model: ModelSpec, hardware: HardwareProfile, console: Console) -> None:
    """Print the analysis."""
    here = variants(model, hardware, CONTEXT_TOKENS)
    flops = prefill_flops_per_token(model)
    context = context_flops_per_token(model, CONTEXT_TOKENS)
    group = f"{hardware.n_gpus} GPUs as one group" if hardware.n_gpus > 1 else "one GPU"
    console.print(f"[bold]kappa: {model.name} on {hardware.name}[/bold] ({group})")
    console.print(
        f"B_kv {model.kv_bytes_per_token:,.0f} bytes a token, F_pfl {flops / 1e9:,.1f} GFLOP a "
        f"token (+{context / flops:.0%} attention at {CONTEXT_TOKENS:,} tokens), GPU memory "
        f"{gib(hardware.gpu_bytes)}, H2D {rate(hardware.h2d.bytes_per_s)} of the group",
        highlight=False,
    )
    console.print(_table("kappa_crit", here, None))
    console.print(_table("what would change it", what_if(model, hardware), here[0]))
    console.print(f"recompute: {advise(here[0].kappa).text}", highlight=False)


def _table(title: str, rows: list[Variant], base: Variant | None) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("variant", no_wrap=True)
    for name in ("BW\nGB/s", "C\nTFLOP/s", "kappa_M\n1e6 FLOP/B", "kappa_HW\n1e-6 B/FLOP"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kappa_crit", justify="right", no_wrap=True, style="bold")
    if base is not None:
        table.add_column("x", justify="right", no_wrap=True)
    table.add_column("note", style="dim")
    for row in rows:
        kappa = row.kappa
        cells = [
            f"{kappa.bytes_per_s / 1e9:,.0f}",
            f"{kappa.flops_per_s / 1e12:,.0f}",
            f"{kappa.kappa_model / 1e6:.3f}",
            f"{kappa.kappa_hardware * 1e6:,.1f}",
            f"{kappa.kappa_crit:,.1f}",
        ]
        if base is not None:
            cells.append(f"{kappa.kappa_crit / base.kappa.kappa_crit:.2f}")
        table.add_row(row.name, *cells, row.note)
    return table


def main() -> int:
    """Exit code: 0, or 2 where the command is wrong."""
    wants_trace = os.environ.setdefault("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    Plugins.instance().register(WorkingFolder)

    def task(composed: DictConfig) -> None:
        config = cast(dict[str, object], OmegaConf.to_container(composed, resolve=True))
        overrides = list(HydraConfig.get().overrides.task)
        model = model_of(group_of(config, "model"), overrides)
        hardware = hardware_from_mapping(group_of(config, "hardware"))
        report(model, hardware, Console())

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except Exception as error:
        message = explain(error)
        if message is None or wants_trace:
            raise
        sys.stderr.write(f"error: {message}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
