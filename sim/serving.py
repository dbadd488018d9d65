"""One serving machine: iteration-level batching over a KV store, as a SimPy process.

Every iteration takes one token of each decoding request, then chunks of the requests in prefill,
then admits waiting requests, all under one token budget. A request's cached prefix is loaded in the
iteration that admits it. What readers get wrong: memory. An admitted request holds K + T tokens at
once and one more per decoded token; when memory runs out the request admitted last is preempted, so
the oldest always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

from simpy import Environment, Event

from policies.admission import Admission, AdmissionView, Waiting
from policies.cost.ragged import RaggedCosts
from policies.errors import PlanError
from policies.prefix import PrefixPolicy, Split
from policies.spec.request import Request
from sim.batch import Live, Running
from sim.draft import Draft
from sim.iteration import Timing, Work, price, timing
from sim.serve_log import Log
from sim.serve_options import ServeOptions
from sim.sessions import Turn
from sim.store import PrefixStore
from sim.writeback import WriteBack


class ServingStalled(RuntimeError):
    """Requests wait, the machine is empty, and nothing will happen any more."""


class Server:
    """A machine with its queue, memory, store and running requests.

    ``plant`` is what an iteration costs, ``belief`` what the prefix policy thinks that it does.
    ``ended`` is called with a turn when it has ended (or was rejected), ``failed`` with the error
    that stops the machine. ``busy_until_s`` is when the iteration that runs ends;
    ``n_waiting`` and ``n_running`` count requests.
    """

    def __init__(
        self,
        env: Environment,
        index: int,
        plant: RaggedCosts,
        belief: RaggedCosts,
        options: ServeOptions,
        admission: Admission,
        prefix: PrefixPolicy,
        capacity_tokens: int,
        store: PrefixStore | None,
        block_tokens: int,
        logs: tuple[Log, Log],
        ended: Callable[[Turn], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.index = index
        self.plant = plant
        self.belief = belief
        self.options = options
        self.capacity_tokens = capacity_tokens
        self.store = store
        self.rejected: list[Turn] = []
        self.n_history = 0  # tokens that requests could have found
        self.n_hit = 0  # tokens that they found
        self._env = env
        self._admission = admission
        self._prefix = prefix
        self._block_tokens = block_tokens
        self._iterations, self._requests = logs
        self._ended = ended
        self._failed = failed
        self._queue: list[Waiting] = []  # the window that policies see
        self._behind: deque[Waiting] = deque()
        self._waiting_tokens = (0, 0)  # cached, new
        self.busy_until_s = 0.0  # end of the iteration that runs
        self._n_preempted = 0  # since the last iteration
        self._live: dict[int, Live] = {}
        self._running = Running(capacity_tokens)
        self._write_back = WriteBack()
        self._wake: Event | None = None
        env.process(self._serve())

    # ---- arrivals -------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue) + len(self._behind)

    @property
    def n_running(self) -> int:
        """Requests in the batch."""
        return len(self._running.order)

    @property
    def held_tokens(self) -> int:
        """Tokens of GPU memory in use, finished requests that are not yet written included."""
        return self._running.held_tokens

    def ahead_tokens(self) -> tuple[int, int]:
        """Cached tokens to load and new tokens to compute before a request that comes now."""
        cached, new = self._waiting_tokens
        return cached, new + sum(live.left for live in self._running.prefilling)

    def resolve(self, turn: Turn) -> Request:
        """The request that ``turn`` would be on this machine now; changes nothing."""
        live = Live(turn, self._env.now, turn.n_history, turn.n_prompt)
        return self._resolved(live, self._max_new)

    @property
    def _max_new(self) -> int:
        return 1 if self.options.prefill_only else self.options.max_new

    def submit(self, turn: Turn) -> None:
        """A turn arrives now."""
        live = Live(turn, self._env.now, turn.n_history, turn.n_prompt)
        request = self._resolved(live, self._max_new)
        if request.n_tokens + self._max_new - 1 > self.capacity_tokens:
            self.rejected.append(turn)
            self._ended(turn)
            return
        self._live[turn.index] = live
        self._behind.append(Waiting(request))
        self._count_waiting(request, 1)
        self._refill()
        if self._wake is not None:
            wake, self._wake = self._wake, None
            wake.succeed()

    def _resolved(self, live: Live, max_new: int, use: bool = False) -> Request:
        """The request as it stands now: what of its history the store holds, and what is new."""
        cached, on_disk = live.n_history, 0
        if self.store is not None:
            segments = live.turn.blocks(live.reusable(live.n_history), self._block_tokens)
            store, now_s = self.store, self._env.now
            found = store.use(segments, now_s) if use else store.match(segments)
            cached = found.n_blocks * self._block_tokens
            on_disk = found.n_disk * self._block_tokens
        return Request(
            index=live.turn.index,
            arrival_s=live.arrival_s,
            n_cached=cached,
            n_prefill=live.n_history - cached + live.n_prompt,
            max_new=max_new,
            n_disk=on_disk,
            group=live.turn.group,
        )

    def _count_waiting(self, request: Request, sign: int) -> None:
        cached, new = self._waiting_tokens
        self._waiting_tokens = cached + sign * request.n_cached, new + sign * request.n_prefill

    def _refill(self) -> None:
        while self._behind and len(self._queue) < self.options.window:
            self._queue.append(self._behind.popleft())

    # ---- the process ----------------------------------------------------------------------

    def _serve(self) -> Generator[Event, None, None]:
        """The process; SimPy would rebuild an exception from its text, so it is handed over."""
        try:
            yield from self._iterate()
        except Exception as error:
            self._failed(error)

    def _iterate(self) -> Generator[Event, None, None]:
        env, options = self._env, self.options
        duplex = self.plant.hardware.duplex
        while True:
            self._make_room()
            if self._running.free_tokens < self._running.n_decode:
                yield from self._idle()  # for the preempted to be written
                continue
            draft, n_admitted = self._draft()
            if draft.n_rows == 0:
                yield from self._idle()
                continue
            work = draft.work()
            layers = price(self.plant, work, options.floor_s)
            spent = timing(
                layers,
                overlap=options.overlap,
                duplex=duplex,
                store_s=self._write_back.pending_s,
            )
            self._record(draft, work, spent, n_admitted)
            self.busy_until_s = env.now + spent.seconds
            yield env.timeout(spent.seconds)
            self._complete(draft, spent)

    def _idle(self) -> Generator[Event, None, None]:
        """Wait for an arrival or for memory to be written back."""
        env = self._env
        next_s = self._write_back.next_s
        if next_s is None and self.n_waiting:
            first = (self._queue or self._behind)[0].request
            raise ServingStalled(
                f"server {self.index} at {env.now:.6f} s: {self.n_waiting} requests wait, none "
                f"runs, {self._running.free_tokens} of {self.capacity_tokens} tokens are free and "
                f"{self._admission.name!r} admits none; the first is request {first.index} "
                f"(K {first.n_cached}, T {first.n_prefill})"
            )
        self._wake = env.event()
        since_s = env.now
        if next_s is None:
            yield self._wake
            written = False
        else:
            timer = env.timeout(next_s)
            yield self._wake | timer
            written = timer.processed
        self._wake = None
        if written:
            self._write_back.written_next()
        else:
            left_s = self._write_back.pending_s - (env.now - since_s)
            self._write_back.set_left(max(0.0, left_s))

    def _make_room(self) -> None:
        """Preempt the requests admitted last until every decoding one can grow by a token."""
        running = self._running
        while running.free_tokens + running.leaving_tokens < running.n_decode:
            live = running.last()
            running.remove(live)
            self._release(live)
            live.preempt()
            request = self._resolved(live, max(1, self._max_new - live.n_emitted))
            self._queue.insert(0, Waiting(request))
            self._count_waiting(request, 1)
            self._n_preempted += 1

    # ---- one iteration --------------------------------------------------------------------

    def _draft(self) -> tuple[Draft, int]:
        """The next iteration: decoding requests, chunks in prefill, then admissions."""
        options, running = self.options, self._running
        draft = Draft(self.plant, self.belief, options, running.n_decode, running.decode_ctx)
        for live in running.prefilling:
            if draft.budget_left <= 0:
                break
            draft.add_chunk(live)
        n_admitted = 0
        if self.n_waiting and draft.budget_left > 0 and self.n_running < options.max_seqs:
            n_admitted = self._admit(draft)
        return draft, n_admitted

    def _admit(self, draft: Draft) -> int:
        running = self._running
        free = running.free_tokens - running.n_decode
        if running.order:
            free -= int(self.options.watermark * self.capacity_tokens)
        if free <= 0:
            return 0
        view = AdmissionView(
            now_s=self._env.now,
            free_tokens=free,
            budget_tokens=draft.budget_left,
            free_seqs=self.options.max_seqs - self.n_running,
            capacity_tokens=self.capacity_tokens,
            running=running.requests.values(),
        )
        chosen = self._admission.choose(self._queue, view)
        if not chosen:
            return 0
        self._check(chosen, free)
        picked = [self._queue[i] for i in chosen]
        self._overtake(chosen)
        taken = set(chosen)
        self._queue = [w for i, w in enumerate(self._queue) if i not in taken]
        self._refill()
        lives = [self._live[waiting.request.index] for waiting in picked]
        requests = []
        for waiting, live in zip(picked, lives, strict=True):
            self._count_waiting(waiting.request, -1)
            requests.append(self._resolved(live, waiting.request.max_new, use=True))
        splits = draft.decide(requests, self._prefix)
        for waiting, live, request, split in zip(picked, lives, requests, splits, strict=True):
            live.max_overtaken = max(live.max_overtaken, waiting.overtaken)
            self._start(live, request, split, draft)
        return len(picked)

    def _check(self, chosen: tuple[int, ...], free: int) -> None:
        need = sum(self._queue[i].request.n_tokens for i in set(chosen))
        if need > free or len(set(chosen)) < len(chosen):
            raise PlanError(
                f"admission of {self._admission.name!r}",
                f"{len(chosen)} requests need {need} tokens of memory, {free} are free",
            )

    def _overtake(self, chosen: tuple[int, ...]) -> None:
        """Count, for everyone left waiting, who was admitted from behind."""
        if chosen == tuple(range(len(chosen))):
            return
        behind = len(chosen)
        taken = set(chosen)
        for position in range(max(chosen)):
            if position in taken:
                behind -= 1
            else:
                self._queue[position].overtaken += behind

    def _start(self, live: Live, request: Request, split: Split, draft: Draft) -> None:
        if live.admitted_s < 0.0:
            live.admitted_s = self._env.now
            live.n_cached, live.n_prefill = request.n_cached, request.n_prefill
            live.split = split
            self.n_history += live.n_history
            self.n_hit += request.n_cached
        live.begin(request, split)
        self._running.admit(live, request)
        draft.load(request, split)
        if draft.budget_left > 0:
            draft.add_chunk(live)

    def _complete(self, draft: Draft, spent: Timing) -> None:
        """The iteration has ended: tokens come out, requests end, stores are issued."""
        running = self._running
        self._write_back.set_left(spent.store_left_s)
        if self.options.write_back and draft.n_new_rows:
            d2h = self.plant.hardware.d2h
            layer_s = self.plant.layer_copy_seconds(d2h, draft.n_new_rows)
            self._write_back.issue(self.plant.model.n_layers * layer_s)
        for live in running.decode_step():
            self._finish(live)
        for live, n_tokens in draft.chunks:
            live.left -= n_tokens
            if live.left:
                continue
            running.prefilling.remove(live)
            live.n_emitted += 1
            if live.first_s < 0.0:
                live.first_s = self._env.now
            if self.options.prefill_only or live.n_emitted >= live.turn.n_response:
                running.remove(live)
                self._finish(live)
            else:
                running.decode(live)

    def _finish(self, live: Live) -> None:
        """Release what a request held and report it; ``live`` is no longer running."""
        self._release(live)
        turn = live.turn
        del self._live[turn.index]
        self._requests.add((
            turn.index, self.index, live.arrival_s, live.admitted_s, live.first_s, self._env.now,
            turn.n_history, live.n_cached, live.n_prefill, live.split.n_head, live.split.n_tail,
            live.n_emitted, live.n_preempted, live.max_overtaken,
        ))  # fmt: skip
        self._ended(turn)

    def _release(self, live: Live) -> None:
        """Free the memory of a request, and offer its blocks to the store, once all is written."""
        n_tokens = live.kv_tokens
        segments = live.turn.blocks(live.reusable(n_tokens), self._block_tokens)
        # A prefill that was cut off has computed none of what it reserved.
        computed = live.first_s >= 0.0

        def written() -> None:
            self._running.free(n_tokens)
            if self.store is not None and computed:
                self.store.put(segments, self._env.now)

        self._write_back.after(written)

    def _record(self, draft: Draft, work: Work, spent: Timing, n_admitted: int) -> None:
        running = self._running
        n_preempted, self._n_preempted = self._n_preempted, 0
        self._iterations.add((
            self.index, self._env.now, spent.seconds, spent.compute_s, spent.load_s, spent.disk_s,
            self._write_back.pending_s, self.n_waiting, len(running.order), draft.n_decode,
            n_admitted, draft.n_rows - draft.n_decode - draft.n_recompute, draft.n_recompute,
            work.n_load, work.n_disk, draft.n_new_rows if self.options.write_back else 0,
            running.held_tokens, n_preempted,
        ))  # fmt: skip
