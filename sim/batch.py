"""The running batch: who decodes, who is in prefill, and the iteration being put together.

Decoding requests all grow by one token an iteration, so nothing is kept per request and iteration:
the batch knows their number, the sum of their contexts, and who ends when. What readers get wrong:
``finish`` times are the plant's knowledge. They come from true response lengths and are never
passed to a policy.
"""

from __future__ import annotations

from collections import defaultdict

from policies.cost.ragged import RaggedCosts
from policies.prefix import IterationView, Split, Totals
from policies.spec.request import Request
from sim.iteration import Work
from sim.serve_options import ServeOptions
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


class Draft:
    """An iteration being put together."""

    def __init__(
        self,
        plant: RaggedCosts,
        belief: RaggedCosts,
        options: ServeOptions,
        n_decode: int,
        decode_ctx: int,
    ) -> None:
        self.n_decode = n_decode
        self.n_rows = n_decode
        self.n_recompute = 0
        self.chunks: list[tuple[Live, int]] = []
        self._plant, self._belief, self._options = plant, belief, options
        self._n_emit = n_decode
        self._n_load = self._n_copies = self._n_disk = 0
        self._attention_s = plant.decode_attention_seconds(n_decode, decode_ctx)
        same = belief is plant
        self._believed_s = (
            self._attention_s if same else belief.decode_attention_seconds(n_decode, decode_ctx)
        )

    @property
    def budget_left(self) -> int:
        """Tokens that may still be computed in this iteration."""
        return self._options.budget_tokens - self.n_rows

    @property
    def n_new_rows(self) -> int:
        """Tokens computed for the first time, whose KV is to be stored."""
        return self.n_rows - self.n_recompute

    def work(self) -> Work:
        """The iteration, for pricing."""
        return Work(self.n_rows, self._n_emit, self._attention_s, self._n_load,
                    max(1, self._n_copies), self._n_disk)  # fmt: skip

    def add_chunk(self, live: Live) -> None:
        """As much of a request's prefill as the budget leaves."""
        n_tokens = min(live.left, self.budget_left)
        for start, stop in live.take(n_tokens):
            self._attend(start, stop)
            self.n_recompute += max(0, min(stop, live.loaded_stop) - start)
        self.n_rows += n_tokens
        self.chunks.append((live, n_tokens))
        if n_tokens == live.left:
            self._n_emit += 1

    def load(self, request: Request, split: Split) -> None:
        """Load what is cached and not recomputed."""
        n_load, n_copies, n_disk = self._loads(request, split)
        self._n_load += n_load
        self._n_copies += n_copies
        self._n_disk += n_disk

    def _loads(self, request: Request, split: Split) -> tuple[int, int, int]:
        n_load = request.n_cached - split.n_head - split.n_tail
        piece = self._options.copy_tokens
        n_copies = -(-n_load // piece) if piece else 0
        # Disk holds the end of the prefix, which is also what a tail recomputes.
        return n_load, n_copies, min(n_load, max(0, request.n_disk - split.n_tail))

    def _attend(self, start: int, stop: int) -> None:
        seconds = self._plant.chunk_attention_seconds(stop - start, start)
        self._attention_s += seconds
        if self._belief is not self._plant:
            seconds = self._belief.chunk_attention_seconds(stop - start, start)
        self._believed_s += seconds

    # ---- what a prefix policy may ask -----------------------------------------------------

    def view(self, request: Request) -> IterationView:
        """This iteration as a prefix policy sees it before ``request`` joins."""
        belief, n_layers = self._belief, self._belief.model.n_layers
        n_new = min(request.n_prefill, self.budget_left)

        def totals(split: Split) -> Totals:
            n_load, n_copies, n_disk = self._loads(request, split)
            h2d_s = belief.layer_copy_seconds(
                belief.hardware.h2d, self._n_load + n_load, max(1, self._n_copies + n_copies)
            )
            disk_s = belief.layer_copy_seconds(belief.hardware.disk_read, self._n_disk + n_disk)
            start = request.n_cached - split.n_tail
            attention_s = self._believed_s + belief.chunk_attention_seconds(split.n_head, 0)
            attention_s += belief.chunk_attention_seconds(split.n_tail + n_new, start)
            n_rows = self.n_rows + split.n_head + split.n_tail + n_new
            compute_s = belief.layers_seconds(n_rows, attention_s)
            return Totals(
                n_layers * max(h2d_s, disk_s), max(self._options.floor_s, compute_s)
            )

        def head_s(n_tokens: int) -> float:
            if n_tokens == 0:
                return 0.0
            attention_s = belief.chunk_attention_seconds(n_tokens, 0)
            return belief.layers_seconds(n_tokens, attention_s)

        def load_s(n_tokens: int) -> float:
            return n_layers * belief.layer_copy_seconds(belief.hardware.h2d, n_tokens)

        return IterationView(
            overlap=self._options.overlap,
            budget_tokens=self.budget_left - n_new,
            totals=totals,
            head_s=head_s,
            load_s=load_s,
        )
