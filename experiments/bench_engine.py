"""``python -m experiments.bench_engine [KEY=VALUE ...]``: compiled against SimPy, planning against
executing.

The keys are those of ``python -m sim``; the job is shortened to a few of its blocks. Both executors
replay the same decisions, so deciding is in neither time, and each is asked for ops per second,
SimPy over fewer of them. What readers get wrong: these are CPU seconds of one thread in one
process. A machine that is busy with something else slows both, so read the ratio.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from policies.cost.model import CostModel
from policies.drive import Decision, Policy, StepContext, drive
from policies.plan.op import Kind, Op
from policies.spec.hardware_file import SHIPPED
from policies.spec.workload import Block
from sim.engine import SimBackend
from sim.executors import BlockTimes, KeptSteps, fast_blocks, simpy_blocks
from sim.fast import FastBackend, run_program
from sim.job import make_job
from sim.program import Programs
from sim.run import RunSpec
from sim.settings import build

POLICIES = (
    "accelerate",
    "accelerate-big",
    "flexgen",
    "flexgen-pinned",
    "flexgen-cpu",
    "tightllm-no-both",
    "tightllm-no-distributor",
    "tightllm-no-loader",
    "tightllm",
)
JOB = ("hardware=h200", "hardware.host_bytes=1.0e12", "workload.limit=null",
       "workload.max_new=null", "workload.reject_long=true")  # fmt: skip
N_BLOCKS = 6
SIMPY_OPS = 100_000

T = TypeVar("T")
Decisions = dict[tuple[int, int], Decision]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy: numbers of ops, and CPU seconds in which they were run and planned.

    ``simpy_s`` and ``fast_s`` cover everything from a step's decision to a block's metrics,
    ``*_alone_s`` linking and executing ops, or arrays, that exist already.
    """

    policy: str
    simpy_ops: int
    simpy_s: float
    simpy_alone_s: float
    fast_ops: int
    fast_s: float
    fast_alone_s: float
    n_steps: int
    planning_s: float


class Replay:
    """A policy whose decisions were taken before."""

    def __init__(self, policy: Policy, decisions: Decisions) -> None:
        self._decisions = decisions
        self.name, self.buffers = policy.name, policy.buffers
        self.blocks, self.place, self.step = policy.blocks, policy.place, policy.step

    def decide(self, ctx: StepContext) -> Decision:
        """What was decided."""
        return self._decisions[ctx.block.index, ctx.step]


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration that the command line describes."""
    with initialize_config_dir(str(SHIPPED), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    return dict(config)


def settings(overrides: Sequence[str]) -> RunSpec:
    """The run that the command line describes."""
    return build(composed([*JOB, *overrides]), overrides)


def measure(spec: RunSpec) -> Row:
    """Both executors over a few blocks of a job, spread over its lengths."""
    job = make_job(spec.workload, spec.model, spec.hardware, spec.policy, spec.seed)
    blocks = spec.policy.blocks(job.blocks)
    placement = spec.policy.place(spec.model, spec.hardware, blocks)
    costs = CostModel(spec.model, spec.hardware, placement)
    sample = blocks[:: max(1, len(blocks) // N_BLOCKS)][:N_BLOCKS]
    decisions: Decisions = {}

    def remember(block: int, step: int, decision: Decision) -> None:
        decisions[block, step] = decision

    planning_s, _ = _cpu(lambda: list(drive(KeptSteps(spec.policy), sample, costs, remember)))
    replay = Replay(spec.policy, decisions)
    fast_s, run = _cpu(lambda: list(_blocks(fast_blocks, replay, sample, costs)))
    fast_ops = sum(times.n_ops for times in run)
    per_step = run[0].n_ops / sample[0].max_new
    steps = max(2, round(SIMPY_OPS / per_step))
    short = [replace(sample[0], max_new=min(sample[0].max_new, steps))]
    simpy_s, run = _cpu(lambda: list(_blocks(simpy_blocks, replay, short, costs)))
    return Row(
        spec.policy.name,
        run[0].n_ops,
        simpy_s,
        _simpy_alone_s(replay, short, costs),
        fast_ops,
        fast_s,
        _fast_alone_s(replay, sample, costs),
        sum(block.max_new for block in sample),
        planning_s,
    )


def _cpu(work: Callable[[], T]) -> tuple[float, T]:
    # What was there before is not looked through by collections in the time that is taken.
    gc.collect()
    gc.freeze()
    start_s = time.process_time()
    done = work()
    return time.process_time() - start_s, done


def _blocks(
    executor: Callable[..., Iterator[BlockTimes]],
    policy: Policy,
    blocks: Sequence[Block],
    costs: CostModel,
) -> Iterator[BlockTimes]:
    return executor(policy, blocks, costs, costs, lambda *_: None, lambda _: 0)


def _simpy_alone_s(policy: Policy, blocks: Sequence[Block], costs: CostModel) -> float:
    ops = list(drive(policy, blocks, costs))
    return _cpu(lambda: SimBackend(costs, costs.hardware.duplex).run(ops))[0]


def _fast_alone_s(policy: Policy, blocks: Sequence[Block], costs: CostModel) -> float:
    steps, spent_s = KeptSteps(policy), 0.0
    programs = Programs(policy, costs.model, costs.placement, costs)
    for fence in drive(steps, blocks, costs):
        program = programs.of_block(steps.taken, fence)
        steps.taken = []
        run = partial(run_program, program.arrays, program.n_steps, costs.hardware.duplex)
        spent_s += _cpu(run)[0]
    return spent_s


# ---- tables --------------------------------------------------------------------------------------


def executors_table(rows: Sequence[Row]) -> Table:
    """Compiled against SimPy."""
    table = Table(title="Executors, M ops per CPU second", box=SIMPLE)
    names = ("policy", "M ops", "", "simpy", "fast", "times")
    for name in (*names, "alone: simpy", "fast", "times"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for r in rows:
        whole = (r.simpy_ops / r.simpy_s / 1e6, r.fast_ops / r.fast_s / 1e6)
        alone = (r.simpy_ops / r.simpy_alone_s / 1e6, r.fast_ops / r.fast_alone_s / 1e6)
        cells = [
            text
            for simpy, fast in (whole, alone)
            for text in (f"{simpy:.3f}", f"{fast:.1f}", f"{fast / simpy:.0f}")
        ]
        table.add_row(r.policy, f"{r.simpy_ops / 1e6:.1f}", f"{r.fast_ops / 1e6:.1f}", *cells)
    return table


def planning_table(rows: Sequence[Row]) -> Table:
    """Planning against executing."""
    table = Table(title="Deciding and executing the same steps, CPU seconds", box=SIMPLE)
    for name in ("policy", "steps", "deciding", "executing", "deciding, us a step", "share"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for r in rows:
        share = r.planning_s / (r.planning_s + r.fast_s)
        table.add_row(
            r.policy, f"{r.n_steps:,}", f"{r.planning_s:.2f}", f"{r.fast_s:.2f}",
            f"{r.planning_s / r.n_steps * 1e6:.0f}", f"{share:.0%}",
        )  # fmt: skip
    return table


def main(overrides: Sequence[str]) -> None:
    """Measure and print."""
    console = Console()
    named = [o for o in overrides if o.startswith("policy=")]
    choices = [[]] if named else [[f"policy={name}"] for name in POLICIES]
    console.print("compiling, or loading what was compiled before")
    FastBackend(_NoCosts()).run([Op(Kind.FORWARD, 0, 0)])
    rows = [measure(settings([*choice, *overrides])) for choice in choices]
    console.print(executors_table(rows))
    console.print(planning_table(rows))


class _NoCosts:
    """Free ops, to compile with."""

    def seconds(self, op: Op) -> float:  # noqa: ARG002
        """Nothing."""
        return 0.0

    def nbytes(self, op: Op) -> int:  # noqa: ARG002
        """Nothing."""
        return 0

    def flops(self, op: Op) -> float:  # noqa: ARG002
        """Nothing."""
        return 0.0


if __name__ == "__main__":
    main(sys.argv[1:])
