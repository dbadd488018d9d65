"""A run request: everything that decides which plan a job becomes, as one JSON file.

The simulator and the GPU engine read the same file, so their plans are equal op by op. What readers
get wrong: ``hardware`` is the *belief*, the machine that the policy reasons about and that sets the
capacities of the tiers. A real machine has its own rates, and only its memory is checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from policies.cost.model import CostModel
from policies.drive import Decision, Policy, drive
from policies.plan.op import Kind, Op
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.hardware_build import check_keys, hardware_from_mapping
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block
from policies.text_file import read_text
from policies.typed import checked

SCHEMA = 1

BYTES_OF_DTYPE = {"float16": 2.0, "bfloat16": 2.0, "float32": 4.0, "float64": 8.0}

_REQUIRED = ("schema", "name", "model", "hardware", "policy", "blocks")
_OPTIONAL = ("gpu_mem_cap_bytes", "steps_run", "seed", "dtype")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A job, a policy and the machine that the policy believes in.

    ``blocks`` are those of the job, before the policy splits or merges batches. ``steps_run``
    cuts longer blocks after so many decode steps; memory and decisions are those of the whole job.
    ``gpu_mem_cap_bytes`` makes the GPU smaller than it is. ``seed`` draws weights and prompts.
    """

    name: str
    model: ModelSpec
    hardware: HardwareProfile
    policy: Policy
    blocks: tuple[Block, ...]
    gpu_mem_cap_bytes: int | None = None
    steps_run: int | None = None
    seed: int = 0
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"request.name: {self.name!r} must be usable as a folder name")
        if not self.blocks:
            raise ValueError("request.blocks: is empty, must hold at least one block")
        if [block.index for block in self.blocks] != list(range(len(self.blocks))):
            raise ValueError("request.blocks: indices must be 0, 1, 2, ... in order")
        if self.gpu_mem_cap_bytes is not None and self.gpu_mem_cap_bytes < 1:
            raise ValueError(
                f"request.gpu_mem_cap_bytes: {self.gpu_mem_cap_bytes} must be >= 1 or null"
            )
        if self.steps_run is not None and self.steps_run < 0:
            raise ValueError(f"request.steps_run: {self.steps_run} must be >= 0 or null")
        if self.seed < 0:
            raise ValueError(f"request.seed: {self.seed} must be >= 0")
        width = BYTES_OF_DTYPE.get(self.dtype)
        if width is None:
            raise ValueError(
                f"request.dtype: {self.dtype!r} is none of {', '.join(BYTES_OF_DTYPE)}"
            )
        for field in ("weight_bytes_per_elem", "kv_bytes_per_elem"):
            if getattr(self.model, field) != width:
                raise ValueError(
                    f"request.dtype: {self.dtype} is {width:g} bytes wide, but model.{field} is "
                    f"{getattr(self.model, field):g}"
                )

    @property
    def machine(self) -> HardwareProfile:
        """The believed machine under the memory cap: what the policy places on."""
        if self.gpu_mem_cap_bytes is None:
            return self.hardware
        capped = min(self.hardware.gpu_bytes, float(self.gpu_mem_cap_bytes))
        reserve = min(self.hardware.gpu_reserve_bytes, capped)
        return replace(self.hardware, gpu_bytes=capped, gpu_reserve_bytes=reserve)

    def last_step(self, block: Block) -> int:
        """The decode step that ends ``block``: at most ``steps_run``."""
        last = block.max_new - 1
        return last if self.steps_run is None else min(last, self.steps_run)

    def plan(
        self,
        belief: CostModel,
        observe: Callable[[int, int, Decision], None] = lambda _block, _step, _decision: None,
    ) -> Iterator[Op]:
        """Ops of the run, cut at ``steps_run``; ``observe`` sees the decisions of the steps kept.

        The fence that ends a block stays, and keeps the key that it has in the whole job.
        """
        blocks = self.policy.blocks(self.blocks)
        last = {block.index: self.last_step(block) for block in blocks}
        ends = {(block.index, len(block.batches)) for block in blocks}

        def seen(block: int, step: int, decision: Decision) -> None:
            if step <= last[block]:
                observe(block, step, decision)

        for op in drive(self.policy, blocks, belief, seen):
            ends_block = op.kind is Kind.FENCE and (op.block, op.batch) in ends
            if op.step <= last[op.block] or (ends_block and op.layer == belief.model.n_layers):
                yield op

    # ---- JSON -----------------------------------------------------------------------------

    def to_json(self) -> str:
        """The request as JSON; ``ValueError`` for a policy that no file can name."""
        record = {
            "schema": SCHEMA,
            "name": self.name,
            "model": asdict(self.model),
            "hardware": hardware_to_mapping(self.hardware),
            "policy": _policy_to_mapping(self.policy),
            "blocks": [
                {"max_new": block.max_new, "batches": [[b.n_seqs, b.prompt_len] for b in
                                                       block.batches]}
                for block in self.blocks
            ],
            "gpu_mem_cap_bytes": self.gpu_mem_cap_bytes,
            "steps_run": self.steps_run,
            "seed": self.seed,
            "dtype": self.dtype,
        }  # fmt: skip
        return json.dumps(record, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RunRequest:
        """The request in a JSON text; ``ValueError`` naming the field that is wrong."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"request: is not valid JSON ({error})") from error
        if not isinstance(data, dict):
            raise ValueError(f"request: holds a {type(data).__name__}, must hold one JSON object")
        check_keys("request", data, _REQUIRED, _OPTIONAL)
        if data["schema"] != SCHEMA:
            raise ValueError(f"request.schema: {data['schema']!r} must be {SCHEMA}")
        for field, kinds in _SCALARS.items():
            value = data.get(field)
            given = value is not None or field not in ("gpu_mem_cap_bytes", "steps_run")
            if field in data and given and (isinstance(value, bool) or type(value) is not kinds):
                raise ValueError(f"request.{field}: {value!r} must be of type {kinds.__name__}")
        return cls(
            model=_model(data["model"]),
            hardware=hardware_of_mapping(_mapping("request.hardware", data["hardware"])),
            policy=_policy(data["policy"]),
            blocks=_blocks(data["blocks"]),
            **{field: data[field] for field in _SCALARS if field in data},
        )


_SCALARS: Mapping[str, type] = {
    "name": str, "gpu_mem_cap_bytes": int, "steps_run": int, "seed": int, "dtype": str,
}  # fmt: skip


def read_request(path: Path) -> RunRequest:
    """The request in a file; ``ValueError`` naming the file."""
    text = read_text(path)
    try:
        return RunRequest.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def hardware_to_mapping(hardware: HardwareProfile) -> dict[str, object]:
    """A profile as nested mappings of numbers, the form that ``hardware_from_mapping`` reads."""
    out: dict[str, object] = {}
    for field in fields(hardware):
        value = getattr(hardware, field.name)
        if field.name == "provenance":
            value = {name: _without_none(asdict(entry)) for name, entry in value.items()}
        elif isinstance(value, Curve | Grid | Link):
            value = asdict(value)
        out[field.name] = value
    return out


def hardware_of_mapping(data: Mapping[str, object]) -> HardwareProfile:
    """``hardware_from_mapping``, which also takes a profile whose provenance is empty."""
    if data.get("provenance") != {}:
        return hardware_from_mapping(data)
    unsourced = {"kind": "guess", "source": "not stated"}
    names = (f.name for f in fields(HardwareProfile) if f.name not in ("name", "provenance"))
    filled = hardware_from_mapping({**data, "provenance": dict.fromkeys(names, unsourced)})
    return replace(filled, provenance={})


def _without_none(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if value is not None and value != ""}


def policy_class(path: str) -> Callable[..., Policy]:
    """The policy that ``policies.module.Class`` names; a file can name no other package."""
    module, _, name = path.rpartition(".")
    if module.startswith("policies."):
        try:
            found = getattr(import_module(module), name, None)
        except ImportError:
            found = None
        if isinstance(found, type) and is_dataclass(found) and hasattr(found, "decide"):
            return cast("Callable[..., Policy]", found)
    raise ValueError(
        f"request.policy.class: {path!r} is no policy (a dataclass with decide()) of this package"
    )


def _policy_to_mapping(policy: Policy) -> dict[str, object]:
    path = f"{type(policy).__module__}.{type(policy).__qualname__}"
    policy_class(path)  # refuses what could not be read again
    return {"class": path, "args": asdict(policy)}  # type: ignore[call-overload]


def _policy(value: object) -> Policy:
    data = _mapping("request.policy", value)
    check_keys("request.policy", data, ("class", "args"), ())
    build = policy_class(str(data["class"]))
    args = _mapping("request.policy.args", data["args"])
    return build(**checked("request.policy.args", cast(type, build), args))


def _model(value: object) -> ModelSpec:
    data = _mapping("request.model", value)
    return ModelSpec(**checked("request.model", ModelSpec, data))


def _blocks(value: object) -> tuple[Block, ...]:
    if not isinstance(value, list):
        raise ValueError(f"request.blocks: {value!r} must be a list")
    blocks = []
    for i, entry in enumerate(value):
        at = f"request.blocks[{i}]"
        data = _mapping(at, entry)
        check_keys(at, data, ("max_new", "batches"), ())
        max_new = data["max_new"]
        if type(max_new) is not int:
            raise ValueError(f"{at}.max_new: {max_new!r} must be of type int")
        try:
            blocks.append(Block(i, tuple(_batches(data["batches"])), max_new))
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from error
    return tuple(blocks)


def _batches(value: object) -> Iterator[Batch]:
    for pair in value if isinstance(value, list) else [value]:
        if not isinstance(pair, list) or [type(n) for n in pair] != [int, int]:
            raise ValueError(f"batches: {pair!r} must be a list of [n_seqs, prompt_len]")
        yield Batch(*pair)


def _mapping(field: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{field}: {value!r} must be a mapping")
    return value
