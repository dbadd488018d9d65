"""Command line of the engine: ``run`` requests, ``generate`` text.

    python -m real run requests/ --out traces/ [--device cuda] [--gpu-mem-cap 40GiB] [--repeat 3]
    python -m real generate --model DIR --prompts prompts.jsonl --out answers.jsonl

Exit code 0: every request ran or did not fit (its ``result.json`` says so); 2: bad input; 130:
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from policies.drive import Policy
from policies.errors import OutOfMemory, error_text
from policies.run_request import RunRequest, policy_class, read_request
from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.hardware_file import SHIPPED, find_profile
from real.backend import Arenas, available_bytes
from real.files import write_result
from real.generate import (
    end_tokens,
    generate,
    model_of,
    pack,
    read_prompts,
    until_end,
)
from real.run import Options, run_request

_UNITS = {"": 1, "GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True, highlight=False)
    try:
        code: int = arguments.command(arguments, console)
    except (ValueError, OSError, OutOfMemory) as error:
        console.print(f"error: {error_text(error)}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("error: interrupted", style="red")
        return 130
    return code


# ---- run ------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.out.exists() and not arguments.out.is_dir():
        raise ValueError(f"out: {arguments.out} is a file, must be a folder")
    requests = [read_request(path) for path in _request_files(arguments.requests)]
    names = [request.name for request in requests]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"requests: two of them are named {twice!r}, a name is a folder")
    options = _options(arguments)
    arenas = Arenas.of(options.device)
    failed = 0
    try:
        for read in requests:
            request = read
            if arguments.gpu_mem_cap is not None:
                request = replace(read, gpu_mem_cap_bytes=arguments.gpu_mem_cap)
            try:
                _run_one(request, options, arenas, arguments.out, console)
            except ValueError as error:  # of this request: the others run all the same
                console.print(f"error: {request.name}: {error}", style="red", markup=False)
                failed += 1
    finally:
        arenas.close()
    return 2 if failed else 0


def _run_one(
    request: RunRequest, options: Options, arenas: Arenas, out: Path, console: Console
) -> None:
    for i, result in enumerate(run_request(request, options, arenas)):
        folder = out / request.name
        if options.repeat > 1:
            folder = folder / f"r{i}"
        write_result(folder, request, result)
        record = result.record
        if record["status"] != "ok":
            console.print(f"{request.name}: {record['status']}: {record['reason']}", markup=False)
            continue
        if i == 0:
            console.print(_consumers(record["memory"]))
        console.print(f"{request.name}: {_summary(record)}", markup=False)


def _consumers(memory: object) -> Table:
    """The largest buffers of every tier."""
    table = Table(title="memory planned", title_justify="left")
    for column in ("tier", "what", "GiB"):
        table.add_column(column, justify="right" if column == "GiB" else "left")
    rows = memory if isinstance(memory, list) else []
    for tier in ("gpu", "host", "disk"):
        mine = [(name, nbytes) for held, name, nbytes in rows if held == tier]
        for name, nbytes in mine[:4]:
            table.add_row(tier, name, f"{nbytes / 2**30:.3f}")
        if mine:
            table.add_row(tier, "all", f"{sum(n for _, n in mine) / 2**30:.3f}", end_section=True)
    return table


def _summary(record: dict[str, object]) -> str:
    def number(name: str, form: str, scale: float = 1.0) -> str:
        value = record[name]
        return "-" if not isinstance(value, int | float) else format(value * scale, form)

    return (
        f"prefill {number('prefill_s', '.3f')} s, "
        f"decode step {number('tpot_s', '.1f', 1e3)} ms, "
        f"{number('decode_tokens_per_s', '.1f')} tokens/s, "
        f"bound ratio of decode {number('decode_bound_ratio', '.3f')}, "
        f"pinned in {number('pin_s', '.1f')} s, built in {number('build_s', '.1f')} s"
    )


def _request_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path}: holds no .json request")
        files += found
    return files


# ---- generate -------------------------------------------------------------------------------


def _generate(arguments: argparse.Namespace, console: Console) -> int:
    folder: Path = arguments.model
    if not arguments.out.parent.is_dir():
        raise ValueError(f"out: {arguments.out.parent} is not a folder")
    model, dtype = model_of(folder, arguments.dtype)
    records = read_prompts(arguments.prompts)
    tokenizer = _tokenizer(folder)
    prompts: list[list[int]] = []
    for number, record in enumerate(records, start=1):
        if "ids" in record:
            prompts.append(list(record["ids"]))  # type: ignore[call-overload]
        elif tokenizer is None:
            raise ValueError(
                f"{arguments.prompts}: prompt {number} is text, which needs tokenizer.json in "
                f"{folder}"
            )
        else:
            prompts.append(list(tokenizer.encode(str(record["prompt"])).ids))
    size = min(len(prompts), 8) if arguments.batch_size is None else arguments.batch_size
    options = _options(arguments)
    request = RunRequest(
        name="generate",
        model=model,
        hardware=_machine(arguments.hardware, options),
        policy=_policy(arguments.policy),
        blocks=pack([len(p) for p in prompts], size, arguments.n_batches, arguments.max_new),
        gpu_mem_cap_bytes=arguments.gpu_mem_cap,
        dtype=dtype,
    )
    result = generate(request, folder, prompts, options)
    ends = end_tokens(folder)
    with arguments.out.open("w", encoding="utf-8") as file:
        for record, tokens in zip(records, result.tokens, strict=True):
            ids = until_end(tokens, ends)
            answer = {**record, "answer_ids": ids, "ended": len(ids) < len(tokens)}
            if tokenizer is not None:
                answer["answer"] = tokenizer.decode(list(ids))
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
    console.print(
        f"{len(prompts)} prompts, {request.policy.name}, {result.trace.makespan_s:.2f} s; the "
        f"policy believes in {request.hardware.name}",
        markup=False,
    )
    return 0


def _tokenizer(folder: Path):  # type: ignore[no-untyped-def]
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer  # only text needs it

    return Tokenizer.from_file(str(path))


def _machine(name: str, options: Options) -> HardwareProfile:
    """A profile with the memory of the machine at hand: rates are believed, sizes are known."""
    path = find_profile(name)
    try:
        hardware = hardware_from_mapping(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    sizes: dict[str, float] = {"host_bytes": available_bytes() + hardware.host_reserve_bytes}
    if options.device.type == "cuda":
        sizes["gpu_bytes"] = torch.cuda.get_device_properties(options.device).total_memory
    return replace(hardware, **sizes)  # type: ignore[arg-type]


def _policy(name: str) -> Policy:
    """A policy by the name of its file in ``conf/policy``."""
    folder = SHIPPED / "policy"
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise ValueError(f"policy: {name!r} is none of {known}")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    target = data.pop("_target_")
    return policy_class(target)(**data)


# ---- arguments ------------------------------------------------------------------------------


def parse_bytes(text: str) -> int:
    """``42949672960``, ``40GiB``, ``40.5 GB``; ``ValueError`` for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{text!r} must be a number of bytes, or a number and one of {units}")
    return int(float(match[1]) * _UNITS[match[2]])


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _options(arguments: argparse.Namespace) -> Options:
    if arguments.threads is not None and arguments.threads < 1:
        raise ValueError(f"threads: {arguments.threads} must be >= 1")
    if arguments.threads is not None or arguments.device == "cpu":
        torch.set_num_threads(arguments.threads or max(1, (os.cpu_count() or 1) - 1))
    return Options(
        device=torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu"),
        disk_dir=arguments.disk_dir,
        repeat=getattr(arguments, "repeat", 1),
        poison=arguments.poison,
        delay_seed=arguments.delays,
    )


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    shared.add_argument("--device", choices=("cuda", "cpu"), default=found)
    shared.add_argument("--gpu-mem-cap", type=_bytes, metavar="BYTES|40GiB")
    temporary = Path(tempfile.gettempdir())
    shared.add_argument("--disk-dir", type=Path, default=temporary, help="folder of the disk tier")
    text = "CPU threads of torch (default: its own; all but one core if the CPU plays the device)"
    shared.add_argument("--threads", type=int, help=text)
    shared.add_argument("--poison", action="store_true", help="fill what must not be read with NaN")
    shared.add_argument("--delays", type=int, metavar="SEED", help="delay ops at random")

    parser = argparse.ArgumentParser(prog="python -m real", description="The torch engine.")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", parents=[shared], help="execute run requests")
    run.add_argument("requests", type=Path, nargs="+", metavar="DIR|FILE")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--repeat", type=int, default=1)
    run.set_defaults(command=_run)

    text = commands.add_parser("generate", parents=[shared], help="continue prompts")
    text.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    text.add_argument("--policy", default="tightllm")
    text.add_argument("--prompts", type=Path, required=True)
    text.add_argument("--out", type=Path, required=True)
    text.add_argument("--max-new", type=int, default=32)
    text.add_argument("--batch-size", type=int, help="default: 8, or fewer if prompts are")
    text.add_argument("--n-batches", type=int, default=4)
    text.add_argument("--hardware", default="h200", help="profile name or YAML file")
    text.add_argument("--dtype", help="default: the checkpoint's")
    text.set_defaults(command=_generate)
    return parser


if __name__ == "__main__":
    sys.exit(main())
