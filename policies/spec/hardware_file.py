"""Where a hardware profile lies: by name or by path.

A profile in ``./conf/hardware`` is where ``calibrate fit`` writes; those shipped come after. What
readers get wrong: a text that ends in ``.yaml`` or ``.yml`` is a path and never a name.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def find_profile(name: str) -> Path:
    """File of a profile; ``ValueError`` that lists the known ones where there is none."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    shipped = Path(str(resources.files("conf"))) / "hardware"
    folders = (Path("conf") / "hardware", shipped)
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise ValueError(f"hardware: {name!r} is no YAML file and none of {', '.join(known)}")
