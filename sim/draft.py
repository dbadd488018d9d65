"""An iteration being put together: what it computes and loads, and what each request recomputes.

Splits are decided when everybody who is admitted is known, because one request's load hides behind
another's compute. What readers get wrong: the draft has two sets of numbers, the plant's, which the
iteration will cost, and the belief's, which is all that a prefix policy is told.
"""

from __future__ import annotations

from policies.cost.ragged import RaggedCosts
from policies.errors import PlanError
from policies.prefix import IterationView, PrefixPolicy, Split, Totals
from policies.spec.request import Request
from sim.batch import Live
from sim.iteration import Work
from sim.serve_options import ServeOptions


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
        self._plant, self.belief, self.options = plant, belief, options
        self._n_emit = n_decode
        self.n_load = self.n_copies = self.n_disk = 0
        self._attention_s = plant.decode_attention_seconds(n_decode, decode_ctx)
        same = belief is plant
        self.believed_s = (
            self._attention_s if same else belief.decode_attention_seconds(n_decode, decode_ctx)
        )

    @property
    def budget_left(self) -> int:
        """Tokens that may still be computed in this iteration."""
        return self.options.budget_tokens - self.n_rows

    @property
    def n_new_rows(self) -> int:
        """Tokens computed for the first time, whose KV is to be stored."""
        return self.n_rows - self.n_recompute

    def work(self) -> Work:
        """The iteration, for pricing."""
        return Work(self.n_rows, self._n_emit, self._attention_s, self.n_load,
                    max(1, self.n_copies), self.n_disk)  # fmt: skip

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
        n_load, n_copies, n_disk = self.loads(request, split)
        self.n_load += n_load
        self.n_copies += n_copies
        self.n_disk += n_disk

    def loads(self, request: Request, split: Split) -> tuple[int, int, int]:
        """Tokens to load, copies a layer, and tokens of them that come from disk."""
        n_load = request.n_cached - split.n_head - split.n_tail
        piece = self.options.copy_tokens
        n_copies = -(-n_load // piece) if piece else 0
        # Disk holds the end of the prefix, which is also what a tail recomputes.
        return n_load, n_copies, min(n_load, max(0, request.n_disk - split.n_tail))

    def _attend(self, start: int, stop: int) -> None:
        seconds = self._plant.chunk_attention_seconds(stop - start, start)
        self._attention_s += seconds
        if self.belief is not self._plant:
            seconds = self.belief.chunk_attention_seconds(stop - start, start)
        self.believed_s += seconds

    # ---- what a prefix policy may ask -----------------------------------------------------

    def decide(self, requests: list[Request], policy: PrefixPolicy) -> list[Split]:
        """The split of every admitted request, each knowing what the others bring."""
        plan = _Plan(self, requests)
        return [plan.decide(i, policy) for i in range(len(requests))]


class _Plan:
    """The iteration as believed while splits are decided: sums over the draft and all admitted."""

    def __init__(self, draft: Draft, requests: list[Request]) -> None:
        self._draft, self._requests = draft, requests
        self._belief, self._options = draft.belief, draft.options
        left, self._n_new = draft.budget_left, []
        for request in requests:
            self._n_new.append(min(request.n_prefill, max(0, left)))
            left -= self._n_new[-1]
        self._left = max(0, left)
        self._rows, self._attention_s = draft.n_rows, draft.believed_s
        self._load, self._copies, self._disk = draft.n_load, draft.n_copies, draft.n_disk
        for i in range(len(requests)):
            self._add(self._parts(i, Split()), 1)

    def _parts(self, i: int, split: Split) -> tuple[int, float, int, int, int]:
        """Rows, attention of a layer, tokens loaded, copies, tokens from disk of one request."""
        request, belief, n_new = self._requests[i], self._belief, self._n_new[i]
        attention_s = belief.chunk_attention_seconds(split.n_head, 0)
        start = request.n_cached - split.n_tail
        attention_s += belief.chunk_attention_seconds(split.n_tail + n_new, start)
        rows = split.n_head + split.n_tail + n_new
        return (rows, attention_s, *self._draft.loads(request, split))

    def _add(self, parts: tuple[int, float, int, int, int], sign: int) -> None:
        self._rows += sign * parts[0]
        self._attention_s += sign * parts[1]
        self._load += sign * parts[2]
        self._copies += sign * parts[3]
        self._disk += sign * parts[4]

    def decide(self, i: int, policy: PrefixPolicy) -> Split:
        """The split of request i; the sums are updated."""
        self._add(self._parts(i, Split()), -1)
        split = policy.split(self._requests[i], self._view(i))
        recomputed = split.n_head + split.n_tail
        if min(split) < 0 or recomputed > self._requests[i].n_cached:
            raise PlanError(
                f"prefix policy {policy.name!r}",
                f"{split} recomputes more than the {self._requests[i].n_cached} cached tokens",
            )
        self._add(self._parts(i, split), 1)
        self._left = max(0, self._left - recomputed)
        return split

    def _view(self, i: int) -> IterationView:
        belief = self._belief
        n_layers, h2d = belief.model.n_layers, belief.hardware.h2d
        disk_read = belief.hardware.disk_read

        def totals(split: Split) -> Totals:
            rows, attention_s, n_load, n_copies, n_disk = self._parts(i, split)
            load_s = belief.layer_copy_seconds(h2d, self._load + n_load, self._copies + n_copies)
            disk_s = belief.layer_copy_seconds(disk_read, self._disk + n_disk)
            link_s = n_layers * max(load_s, disk_s)
            compute_s = belief.layers_seconds(self._rows + rows, self._attention_s + attention_s)
            compute_s = max(self._options.floor_s, compute_s)
            if self._options.overlap:
                shorter, longer = sorted((link_s, compute_s))
                return Totals(link_s, compute_s, longer + shorter / n_layers)
            return Totals(link_s, compute_s, link_s + compute_s)

        def head_s(n_tokens: int) -> float:
            if n_tokens == 0:
                return 0.0
            return belief.layers_seconds(n_tokens, belief.chunk_attention_seconds(n_tokens, 0))

        def load_s(n_tokens: int) -> float:
            return n_layers * belief.layer_copy_seconds(h2d, n_tokens)

        return IterationView(self._options.overlap, self._left, totals, head_s, load_s)
