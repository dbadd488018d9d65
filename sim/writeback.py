"""Write-back: copies of new KV to the host, which run beside the iterations that follow.

Stores queue on the D2H direction. A finished request's memory is free only when the last of its KV
has left it, so a slow D2H holds memory. What readers get wrong: the paper leaves this traffic out;
it costs little bandwidth of its own, but while it runs the loads run at the duplex rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class WriteBack:
    """Seconds of stores pending on D2H, and what happens when a given one has been written."""

    def __init__(self) -> None:
        self.pending_s = 0.0
        self._issued_s = 0.0
        self._then: deque[tuple[float, Callable[[], None]]] = deque()

    def issue(self, seconds: float) -> None:
        """Queue a store of so many uncontended seconds."""
        self.pending_s += seconds
        self._issued_s += seconds

    def after(self, action: Callable[[], None]) -> None:
        """Do ``action`` when everything issued so far is written (now, if nothing is pending)."""
        if self.pending_s <= 0.0 and not self._then:
            action()
        else:
            self._then.append((self._issued_s, action))

    def set_left(self, pending_s: float) -> None:
        """Time went by: ``pending_s`` is left; do what was waiting for the rest."""
        self.pending_s = pending_s
        # Compared as what is left, as written_next computes it; an empty queue has written all.
        while self._then and (pending_s <= 0.0 or self._issued_s - self._then[0][0] >= pending_s):
            self._then.popleft()[1]()

    def written_next(self) -> None:
        """The time that ``next_s`` named has passed."""
        mark_s = self._then[0][0]
        self.set_left(max(0.0, self._issued_s - mark_s))

    @property
    def next_s(self) -> float | None:
        """Uncontended seconds until the next waiting action; None if nothing waits."""
        if not self._then:
            return None
        return max(0.0, self._then[0][0] - (self._issued_s - self.pending_s))
