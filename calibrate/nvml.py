"""Clocks, power and temperature of a GPU through NVML, by ctypes: no package needed.

What readers get wrong: NVML numbers devices by PCI bus and ignores CUDA_VISIBLE_DEVICES, so a
device is looked up by its UUID, never by its CUDA index. Where the library or a reading is missing
the answer is an empty mapping, never a zero.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK, _MEMORY_CLOCK, _GPU_TEMPERATURE = 1, 2, 0


class Nvml:
    """One GPU's readings; ``uuid`` as torch prints it (with or without the ``GPU-`` prefix)."""

    def __init__(self, uuid: str) -> None:
        self._library: ctypes.CDLL | None = None
        self._handle = ctypes.c_void_p()
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if library.nvmlInit_v2() != 0:
            return
        status = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._handle))
        if status == 0:
            self._library = library

    @property
    def available(self) -> bool:
        """Whether the GPU was found."""
        return self._library is not None

    def state(self) -> dict[str, float]:
        """Clocks in MHz, power in W and temperature in C; what cannot be read is left out."""
        readings = {
            "sm_mhz": self._read("nvmlDeviceGetClockInfo", _SM_CLOCK),
            "memory_mhz": self._read("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            "power_w": self._read("nvmlDeviceGetPowerUsage", scale=1e-3),
            "temperature_c": self._read("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
        }
        return {key: value for key, value in readings.items() if value is not None}

    def power_limit_w(self) -> float | None:
        """The power limit in force."""
        return self._read("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3)

    def driver(self) -> str:
        """Version of the driver; empty if unknown."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlSystemGetDriverVersion(text, 96) != 0:
            return ""
        return text.value.decode()

    def _read(self, function: str, *selector: int, scale: float = 1.0) -> float | None:
        if self._library is None:
            return None
        value = ctypes.c_uint(0)
        call: Callable[..., int] = getattr(self._library, function)
        status = call(self._handle, *selector, ctypes.byref(value))
        return value.value * scale if status == 0 else None
