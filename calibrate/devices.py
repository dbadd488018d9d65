"""Whether a profile was measured on the device that it is held against.

What readers get wrong: a profile may have numbers of several devices. One foreign number is enough
for a warning, and so is one foreign run.
"""

from __future__ import annotations

from collections.abc import Collection

from policies.spec.hardware import HardwareProfile


def device_warning(hardware: HardwareProfile, devices: Collection[str], here: str) -> str:
    """Which devices differ; empty where the profile was measured on exactly ``devices``.

    ``here`` introduces ``devices``: "this is".
    """
    measured = {p.device for p in hardware.provenance.values() if p.kind == "measured"} - {""}
    found = f"{here} {', '.join(sorted(devices)) or 'a device without a name'}"
    if not measured:
        return f"the profile names no device that it was measured on, {found}"
    if measured == set(devices):
        return ""
    return f"the profile was measured on {', '.join(sorted(measured))}, {found}"
