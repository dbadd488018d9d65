"""The running batch: who decodes, who is in prefill, and who holds how much memory.

Decoding requests all grow by one token an iteration, so nothing is kept per request and iteration:
the batch knows their number, the sum of their contexts, and who ends when. What readers get wrong:
``finish`` times are the plant's knowledge. They come from true response lengths and are never
passed to a policy.
"""

from __future__ import annotations

from collections import defaultdict

from policies.prefix import Split
from policies.spec.request import Request
from sim.sessions import Turn


class Live:
    """A turn from arrival to end, with what is true and what has happened to it.

    ``segments`` are the token ranges left to compute, in order; ``left`` their total. A preempted
    request returns with everything that it had computed as history.
    """

    __slots__ = (
        "_decode_from", "_running", "admitted_s", "arrival_s", "first_s", "kv_start",
        "left", "loaded_stop", "max_overtaken", "n_cached", "n_emitted", "n_history",
        "n_preempted", "n_prefill", "n_prompt", "segments", "split", "stop_at", "turn",
    )  # fmt: skip

    def __init__(self, turn: Turn, arrival_s: float, n_history: int, n_prompt: int) -> None:
        self.turn = turn
        self.arrival_s = arrival_s
        self.n_history = n_history
        self.n_prompt = n_prompt
        self.n_emitted = 0
        self.n_preempted = 0
        self.max_overtaken = 0
        self.admitted_s = -1.0
        self.first_s = -1.0
        self.n_cached = 0
        self.n_prefill = 0
        self.split = Split()
        self.segments: list[tuple[int, int]] = []
        self.left = 0
        self.loaded_stop = 0  # cached tokens of this admission; those below it are recomputed
        self.kv_start = 0  # tokens held when prefill ends
        self.stop_at = -1  # iteration in which the last token comes out
        self._decode_from = -1
        self._running: Running | None = None

    def reusable(self, n_tokens: int) -> int:
        """Of the first ``n_tokens`` of the context, those that later requests may find."""
        return min(n_tokens, self.turn.n_history) if self.turn.is_document else n_tokens

    def begin(self, request: Request, split: Split) -> None:
        """Admitted: what is left to compute is the head, the tail and the new tokens."""
        tail = (request.n_cached - split.n_tail, request.n_tokens)
        self.segments = [(0, split.n_head), tail] if split.n_head else [tail]
        self.left = split.n_head + split.n_tail + request.n_prefill
        self.loaded_stop = request.n_cached
        self.kv_start = request.n_tokens

    def take(self, n_tokens: int) -> list[tuple[int, int]]:
        """Cut the next ``n_tokens`` off the segments."""
        taken = []
        while n_tokens:
            start, stop = self.segments[0]
            cut = min(stop, start + n_tokens)
            taken.append((start, cut))
            n_tokens -= cut - start
            if cut == stop:
                self.segments.pop(0)
            else:
                self.segments[0] = (cut, stop)
        return taken

    @property
    def kv_tokens(self) -> int:
        """Tokens of GPU memory held: reserved at admission, one more per decoded token."""
        grown = self._running.iteration - self._decode_from if self._running else 0
        return self.kv_start + grown

    def decode_from(self, running: Running) -> None:
        """The first token is out and the next iterations decode."""
        self._running, self._decode_from = running, running.iteration
        self.stop_at = running.iteration + self.turn.n_response - self.n_emitted

    def preempt(self) -> None:
        """Back to the queue: what decoding had computed is history, a cut prefill starts anew."""
        if self._running is not None:
            computed = self.kv_tokens
            self.n_emitted += computed - self.kv_start
            # The token that came out last is not yet in the cache.
            self.n_history, self.n_prompt = computed, 1
        self._running, self._decode_from, self.stop_at = None, -1, -1
        self.n_preempted += 1

    def settle(self) -> None:
        """Ended by decoding: fix the counts that followed from the iteration number."""
        grown = self.kv_tokens - self.kv_start
        self.n_emitted += grown
        self.kv_start += grown
        self._running = None


class Running:
    """Requests in GPU memory and the memory itself."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.held_tokens = 0
        self.leaving_tokens = 0  # of those, by requests that have left and are not yet written
        self.iteration = 0  # iterations ended
        self.n_decode = 0
        self.decode_ctx = 0  # sum of the contexts of the decoding requests
        self.order: dict[int, Live] = {}  # in order of admission
        self.requests: dict[int, Request] = {}
        self.prefilling: list[Live] = []
        self._stops: defaultdict[int, list[Live]] = defaultdict(list)

    @property
    def free_tokens(self) -> int:
        """Memory that nobody holds."""
        return self.capacity_tokens - self.held_tokens

    def last(self) -> Live:
        """The request admitted last."""
        return self.order[next(reversed(self.order))]

    def admit(self, live: Live, request: Request) -> None:
        """Reserve K + T."""
        self._hold(request.n_tokens)
        self.order[request.index] = live
        self.requests[request.index] = request
        self.prefilling.append(live)

    def decode(self, live: Live) -> None:
        """Prefill has ended; decoding begins with the next iteration."""
        live.decode_from(self)
        stops = self._stops[live.stop_at]
        if live not in stops:  # preempted and back in the same iteration: it is there already
            stops.append(live)
        self.n_decode += 1
        self.decode_ctx += live.kv_tokens

    def decode_step(self) -> list[Live]:
        """One token of every decoding request; returns those that ended, no longer running."""
        self._hold(self.n_decode)
        self.decode_ctx += self.n_decode
        self.iteration += 1
        ended = [x for x in self._stops.pop(self.iteration, ()) if x.stop_at == self.iteration]
        for live in ended:
            self.remove(live)
            live.settle()
        return ended

    def remove(self, live: Live) -> None:
        """Take a request out of the batch; its memory stays held until ``free``."""
        self.leaving_tokens += live.kv_tokens
        index = live.turn.index
        del self.order[index]
        del self.requests[index]
        if live.stop_at >= 0:
            self.n_decode -= 1
            self.decode_ctx -= live.kv_tokens
        elif live in self.prefilling:
            self.prefilling.remove(live)

    def free(self, n_tokens: int) -> None:
        """Give memory back."""
        self.held_tokens -= n_tokens
        self.leaving_tokens -= n_tokens
        if self.held_tokens < 0:
            raise AssertionError(f"memory: {n_tokens} tokens freed, {-self.held_tokens} too many")

    def _hold(self, n_tokens: int) -> None:
        self.held_tokens += n_tokens
        if self.held_tokens > self.capacity_tokens:
            raise AssertionError(
                f"memory: {self.held_tokens} of {self.capacity_tokens} tokens are held"
            )
