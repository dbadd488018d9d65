"""Goldens, grade 2 (measured): real offloading runs on one H200, OPT-30B cut to 12 layers.

The simulator knows only the machine (`conf/hardware/h200.yaml`, which is the recorded link and
kernel measurement); nothing was fitted to these rows. What readers get wrong: the runs were cut for
time, so each row is compared over the very steps that it ran, and a step of `accelerate seq` is
that of one chunk of 16 sequences.

``python -m tests.golden.test_h200_peers`` prints the table of tests/README.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from policies.accelerate import Accelerate
from policies.cost.model import CostModel
from policies.drive import Policy, drive
from policies.errors import OutOfMemory
from policies.flexgen import FlexGen
from policies.plan.memory import check_run
from policies.plan.op import Kind, Op
from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.model import ModelSpec
from policies.trace.metrics import metrics
from sim.engine import SimBackend
from sim.pack import fixed

GIB = 2**30
# FlexLLMGen moves weights of a pinned store; weights of Accelerate are pageable unless pinned.
SYSTEMS: dict[str, Policy] = {
    "flexgen pinned": FlexGen(kv_pinned=True),
    "flexgen stock": FlexGen(),
    "accelerate big": Accelerate(batches="big"),
    "accelerate seq": Accelerate(batches="seq"),
    "accelerate big-pinned": Accelerate(batches="big", pinned=True),
}
DECODE_TOLERANCE = 0.10
PREFILL_TOLERANCE = {"accelerate seq": 0.10, "flexgen pinned": 0.25, "accelerate big": 0.25}


@dataclass(frozen=True, slots=True)
class Times:
    """``prefill_s`` of all sequences; mean ``step_s`` over the first steps."""

    prefill_s: float
    step_s: float


@cache
def machine() -> HardwareProfile:
    text = (resources.files("conf") / "hardware" / "h200.yaml").read_text(encoding="utf-8")
    return replace(hardware_from_mapping(yaml.safe_load(text)), gpu_bytes=40 * GIB)


@cache
def model() -> ModelSpec:
    text = (resources.files("conf") / "model" / "opt-30b.yaml").read_text(encoding="utf-8")
    return replace(ModelSpec(**yaml.safe_load(text)), n_layers=12)


@cache
def measured() -> dict[str, dict[str, object]]:
    path = Path(__file__).parent / "h200_peers_prompt1024.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {f"{row['system']} {row['variant']}": row for row in rows}


@cache
def simulated(
    name: str,
    prompt_len: int,
    n_steps: int,
    gen_len: int = 32,
    costs_of: type[CostModel] = CostModel,
) -> Times:
    """A run of 16 x 4 sequences, all decode steps; the mean is over the first ``n_steps``."""
    policy = SYSTEMS[name]
    blocks = policy.blocks(fixed(4, 16, prompt_len, gen_len).blocks)
    placement = policy.place(model(), machine(), blocks)
    check_run(model(), machine(), placement, policy.buffers, blocks)
    costs = costs_of(model(), machine(), placement)
    # Chunks of `seq` are blocks and all alike: one is simulated.
    ops = list(drive(policy, blocks[:1], costs))
    found = metrics(SimBackend(costs, machine().duplex).run(ops))
    return Times(found.prefill_s * len(blocks), fmean(found.step_s[0][:n_steps]))


def peer(name: str) -> Times:
    row = measured()[name]
    steps = row["step_s"]
    assert isinstance(steps, list)
    return Times(float(str(row["prefill_s"])), fmean(steps))


def n_steps(name: str) -> int:
    return int(str(measured()[name]["steps_run"]))


def error(found: float, reference: float) -> float:
    return found / reference - 1.0


REQUIRED = [name for name in SYSTEMS if name != "accelerate big-pinned"]


@pytest.mark.parametrize("name", REQUIRED)
def test_decode_steps(name: str) -> None:
    found, reference = simulated(name, 1024, n_steps(name)), peer(name)
    assert abs(error(found.step_s, reference.step_s)) < DECODE_TOLERANCE


@pytest.mark.parametrize("name", PREFILL_TOLERANCE)
def test_prefill(name: str) -> None:
    found, reference = simulated(name, 1024, n_steps(name)), peer(name)
    assert abs(error(found.prefill_s, reference.prefill_s)) < PREFILL_TOLERANCE[name]


def test_rows_are_what_this_file_compares() -> None:
    """Same job in every row; a step of `seq` is a quarter of the sequences."""
    for name in SYSTEMS:
        row = measured()[name]
        job = ("model", "layers", "gpu_batch", "num_batches", "prompt_len", "gen_len")
        assert [row[key] for key in job] == ["opt-30b", 12, 16, 4, 1024, 32]
        sequences = 16 if name == "accelerate seq" else 64
        rate = sequences / peer(name).step_s
        assert rate == pytest.approx(float(str(row["decode_tok_s"])), rel=1e-3)


def test_cost_of_pageable_memory_has_the_right_sign() -> None:
    """Stock FlexGen and pageable Accelerate are slower than their pinned variants, as measured."""
    for slow, fast in (
        ("flexgen stock", "flexgen pinned"),
        ("accelerate big", "accelerate big-pinned"),
    ):
        for times in (peer, lambda name: simulated(name, 1024, n_steps(name))):
            assert times(slow).step_s > 1.3 * times(fast).step_s
            assert times(slow).prefill_s > 1.05 * times(fast).prefill_s


class TouchingCosts(CostModel):
    """Charges a copy into pageable KV that nobody has written yet for the pages it touches.

    FlexGen allocates its cache for each job and prefill writes it first; the operating system
    maps a page at its first write. The rate is that of the record, on all threads.
    """

    def seconds(self, op: Op) -> float:
        seconds = super().seconds(op)
        if op.kind is Kind.HOST_COPY and any(s.name.startswith("host/kv/") for s in op.writes):
            seconds += first_touch_s_per_byte() * self.nbytes(op)
        return seconds


@cache
def first_touch_s_per_byte() -> float:
    path = Path(__file__).parent / "h200_linkbench.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    return float(record["host"]["first_touch_s_per_gib"]) / GIB


def test_first_touch_explains_the_stock_prefill() -> None:
    """Without it stock FlexGen's prefill comes out a third too short; with it, within 10 %.

    It is an explanation, not part of the cost model: nothing else changes with it.
    """
    plain = simulated("flexgen stock", 1024, 1, gen_len=2)
    touching = simulated("flexgen stock", 1024, 1, gen_len=2, costs_of=TouchingCosts)
    reference = peer("flexgen stock")
    kv_bytes = 64 * 1024 * model().kv_bytes_per_token
    assert first_touch_s_per_byte() * kv_bytes == pytest.approx(0.982, abs=0.001)
    assert -0.40 < error(plain.prefill_s, reference.prefill_s) < -0.25
    assert abs(error(touching.prefill_s, reference.prefill_s)) < 0.10
    assert touching.step_s == pytest.approx(plain.step_s, rel=1e-6)
    pinned = simulated("flexgen pinned", 1024, 1, gen_len=2, costs_of=TouchingCosts)
    assert pinned == simulated("flexgen pinned", 1024, 1, gen_len=2)


def report(prompt_len: int) -> str:
    """Markdown rows: simulated, and measured with errors where it was measured."""
    lines = []
    for name in SYSTEMS:
        try:
            found = simulated(name, prompt_len, n_steps(name))
        except OutOfMemory as memory:
            lines.append(f"| {name} | {memory} |")
            continue
        cells = [name, f"{found.prefill_s:.3f}", f"{found.step_s:.4f}"]
        if prompt_len == 1024:
            reference = peer(name)
            cells += [
                f"{reference.prefill_s:.3f}",
                f"{error(found.prefill_s, reference.prefill_s):+.1%}",
                f"{reference.step_s:.4f}",
                f"{error(found.step_s, reference.step_s):+.1%}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    for length in (512, 1024, 2048):
        print(f"prompt {length}\n{report(length)}\n")  # noqa: T201
        touched = simulated("flexgen stock", length, 15, costs_of=TouchingCosts)
        print(f"flexgen stock with first touch: prefill {touched.prefill_s:.3f} s\n")  # noqa: T201
