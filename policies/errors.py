"""Errors with the facts a user needs as attributes.

Infeasible work that a run expects to meet becomes a result row; these exceptions carry what such a
row says. Bad input is a plain ``ValueError`` naming field, value and allowed range.
"""


class OutOfMemory(Exception):
    """A memory plan does not fit: ``tier`` needs ``need_bytes`` and has ``have_bytes``.

    ``key`` names the largest consumer: a memory pool, or the op that asked.
    """

    def __init__(self, tier: str, need_bytes: int, have_bytes: int, key: str) -> None:
        self.tier = tier
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes
        self.key = key
        super().__init__(
            f"{tier} memory: need {need_bytes / 1e9:.2f} GB, have {have_bytes / 1e9:.2f} GB "
            f"(largest: {key})"
        )


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
