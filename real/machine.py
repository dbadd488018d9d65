"""What a measurement ran on: device, driver, versions, clocks where they can be read."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import torch

_CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def environment(device: torch.device) -> dict[str, object]:
    """Columns that say which machine and software gave a record."""
    columns: dict[str, object] = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type != "cuda":
        return {**columns, "device": device_name(device), "threads": torch.get_num_threads()}
    return {
        **columns,
        "device": device_name(device),
        "cuda": torch.version.cuda,
        **_query(device),
    }


def device_name(device: torch.device) -> str:
    """The GPU by name; the host's processor as ``CPU NAME``."""
    if device.type == "cuda":
        name: str = torch.cuda.get_device_name(device)
        return name
    return f"CPU {processor()}"


def processor() -> str:
    """The host's processor by name, its architecture where the system does not say."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _query(device: torch.device) -> dict[str, object]:
    """Driver and clocks as ``nvidia-smi`` says; nothing where it does not run."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"driver": None}
    fields = ("driver_version", *_CLOCKS)
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(  # noqa: S603  # a fixed command
            [*command, f"--id={device.index or 0}"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {"driver": None}
    driver, *values = (value.strip() for value in out.strip().split(","))
    names = ("sm_clock_mhz", "memory_clock_mhz", "watts", "temperature_c")
    return {"driver": driver, **dict(zip(names, values, strict=False))}


def peak_host_bytes() -> int:
    """Most host memory that this process ever held (``VmHWM``), locked memory included."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status: has no VmHWM")
