"""What is being measured on: names, versions and capacities."""

from __future__ import annotations

import os
import shutil

from calibrate.bench import Bench, meminfo
from calibrate.record import Machine


def machine(bench: Bench) -> Machine:
    """The device, its driver, torch and the host's processor."""
    import torch

    from real.machine import device_name, processor

    host = f"{processor()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    driver = bench.nvml.driver() if bench.nvml is not None else ""
    return Machine(device_name(torch.device(bench.device)), driver, torch.__version__, host)


def capacities(bench: Bench) -> dict[str, float]:
    """Bytes of each tier and what is taken of it before anything runs."""
    total, available = meminfo("MemTotal"), meminfo("MemAvailable")
    readings = {"host_bytes": total, "host_used_bytes": total - available}
    if bench.is_cuda:
        import torch

        free, device_total = torch.cuda.mem_get_info()
        readings |= {
            "gpu_bytes": float(device_total),
            "gpu_used_bytes": float(device_total - free) - torch.cuda.memory_reserved(),
        }
    if bench.disk_dir is not None:
        readings["disk_bytes"] = float(shutil.disk_usage(bench.disk_dir).free)
    return readings
