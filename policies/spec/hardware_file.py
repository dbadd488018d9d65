"""Where a hardware profile lies: by name or by path.

``calibrate fit`` writes into ``./conf/hardware``; other profiles are shipped. What readers get
wrong: a name means one file. One that is in both places, with different numbers, is refused here as
the simulator refuses it, and a text that ends in ``.yaml`` or ``.yml`` is a path and never a name.
"""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[2] / "conf"  # by its path: a ./conf hides the package


def find_profile(name: str) -> Path:
    """File of a profile; ``ValueError`` where there is none, or two that differ."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    folders = (Path("conf") / "hardware", SHIPPED / "hardware")
    found = [file for folder in folders if (file := folder / f"{name}.yaml").is_file()]
    if not found:
        known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        raise ValueError(f"profile: {name!r} is no YAML file and none of {', '.join(known)}")
    if found[0].read_bytes() != found[-1].read_bytes():
        raise ValueError(f"{found[0]}: has the name of a shipped file, give it another")
    return found[0]
