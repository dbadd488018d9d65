"""Errors with the facts a user needs as attributes.

Infeasible work that a run expects to meet becomes a result row; these exceptions carry what such a
row says. Bad input is a plain ``ValueError`` naming field, value and allowed range.
"""


def error_text(error: Exception) -> str:
    """The error in one line; one of the system is ``FILE: what is wrong`` if it knows a file."""
    if not isinstance(error, OSError):
        return str(error)
    if error.filename is None:
        return error.strerror or str(error) or type(error).__name__
    if isinstance(error, FileExistsError):
        return f"{error.filename}: must be a folder, a file is in the way"
    if isinstance(error, NotADirectoryError):
        return f"{error.filename}: a file is in the way of this path"
    return f"{error.filename}: {error.strerror}"


class OutOfMemory(Exception):
    """A memory plan does not fit: ``tier`` needs ``need_bytes`` and has ``have_bytes``.

    ``key`` names the largest consumer: a memory pool, or the op that asked.
    """

    def __init__(self, tier: str, need_bytes: int, have_bytes: int, key: str) -> None:
        self.tier = tier
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes
        self.key = key
        scale, unit = _unit(need_bytes - have_bytes)
        need, have = (f"{n / scale:.{2 if unit != 'B' else 0}f}" for n in (need_bytes, have_bytes))
        super().__init__(f"{tier} memory: need {need} {unit}, have {have} {unit} (largest: {key})")


def _unit(shortage_bytes: float) -> tuple[float, str]:
    """Bytes of the largest decimal unit in which two decimals show a shortage, and its name."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if shortage_bytes >= scale / 50:
            return scale, unit
    return 1.0, "B"


class PlanError(Exception):
    """A plan breaks a rule: ``key`` is the op at which it was found, ``rule`` names the law."""

    def __init__(self, key: str, rule: str) -> None:
        self.key = key
        self.rule = rule
        super().__init__(f"{rule} (at {key})")


class Infeasible(Exception):
    """No decision satisfies the constraints; ``reason`` says which one failed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
