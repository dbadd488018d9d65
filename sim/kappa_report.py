"""The kappa analysis for a reader: every variant of kappa_crit, and what would change it.

What readers get wrong: "x" compares with the first row, the machine as it is measured, and not with
the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from policies.cost.kappa import advise, context_flops_per_token, prefill_flops_per_token
from policies.cost.kappa_report import Variant, variants, what_if
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from sim.kappa_search import KappaRecord
from sim.report import gib, rate

CONTEXT_TOKENS = 65_536  # context at which the term that the paper drops is shown


def print_kappa(model: ModelSpec, hardware: HardwareProfile, console: Console) -> None:
    """Print the analysis of one model on one machine."""
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


def kappa_line(label: str, overrides: Sequence[str], record: KappaRecord) -> str:
    """One line for a run of a sweep."""
    cell = [text for text in overrides if not text.startswith("+experiment=")]
    what = " ".join(cell) or f"{record.model} {record.hardware}"
    found = record.kappa_crit_simulated
    simulated = f"{found:,.2f} simulated" if found is not None else "not found by the simulator"
    return f"#{label} {what}: kappa_crit {record.kappa_crit:,.2f}, {simulated}"
