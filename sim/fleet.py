"""A serving run: clients, a router, and one or more machines on one clock.

What readers get wrong: a router sees what a front end could know, queue lengths, hit lengths and
predicted times, and never how long a response will be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from simpy import Environment

from policies.admission import Admission, Fifo
from policies.cost.kappa import prefill_flops_per_token
from policies.cost.ragged import RaggedCosts
from policies.prefix import LoadAll, PrefixPolicy
from policies.routing import MachineView, Routing, ShortestFinish
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from sim.arrivals import Arrivals, Clients
from sim.serve_log import ITERATION_COLUMNS, REQUEST_COLUMNS, Log
from sim.serve_options import ServeOptions, kv_capacity_tokens, store_blocks
from sim.serving import Server, ServingStalled
from sim.sessions import Sessions, Turn
from sim.store import DiskSpeed, PrefixStore

BLOCK_TOKENS = 256  # of a store whose trace does not fix it
PROGRESS_TURNS = 500
_COUNTS = ("n_demoted", "n_promoted", "n_dropped")


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """Everything that a serving run depends on, the turns apart.

    Prefix policies and the router reason with ``belief`` (None: each machine as it is).
    """

    model: ModelSpec
    machines: tuple[HardwareProfile, ...]
    options: ServeOptions = field(default_factory=ServeOptions)
    arrivals: Arrivals = field(default_factory=Arrivals)
    admission: Admission = field(default_factory=Fifo)
    prefix: PrefixPolicy = field(default_factory=LoadAll)
    routing: Routing = field(default_factory=ShortestFinish)
    belief: HardwareProfile | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.machines:
            raise ValueError("serve.fleet: is empty, needs at least one machine")
        if self.belief is not None and len(self.machines) > 1:
            raise ValueError("belief: applies to one machine, the fleet has several")
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed} must be >= 0")


@dataclass(frozen=True, slots=True)
class ServeRun:
    """What happened: logs, and the state of the machines at the end."""

    iterations: Log
    requests: Log
    end_s: float
    n_rejected: int
    n_history: int
    n_hit: int
    capacity_tokens: tuple[int, ...]
    extrapolated: tuple[str, ...]
    block_tokens: int = BLOCK_TOKENS
    rejected: tuple[int, ...] = ()
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))


def serve(
    spec: ServeSpec,
    sessions: Sessions,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> ServeRun:
    """Serve every turn. ``OutOfMemory`` if a machine cannot hold the model's weights.

    ``ServingStalled`` names who waits for what if the simulation cannot go on.
    """
    env = Environment()
    logs = Log(ITERATION_COLUMNS), Log(REQUEST_COLUMNS)
    fleet = _Fleet(env, spec, sessions, logs, progress)
    clients = Clients(env, spec.arrivals, sessions, fleet.submit, np.random.default_rng(spec.seed))
    fleet.clients = clients
    try:
        env.run(until=fleet.done)
    except RuntimeError as error:
        if fleet.done.triggered:
            raise
        raise ServingStalled(fleet.waits()) from error
    if fleet.error is not None:
        raise fleet.error
    servers = fleet.servers
    return ServeRun(
        iterations=logs[0],
        requests=logs[1],
        end_s=env.now,
        n_rejected=sum(len(s.rejected) for s in servers),
        n_history=sum(s.n_history for s in servers),
        n_hit=sum(s.n_hit for s in servers),
        capacity_tokens=tuple(s.capacity_tokens for s in servers),
        extrapolated=tuple(sorted({name for s in servers for name in s.plant.extrapolated})),
        block_tokens=fleet.block_tokens,
        rejected=tuple(turn.index for s in servers for turn in s.rejected),
        counts=fleet.store_counts(),
    )


class _Fleet:
    """The machines, the router before them, and the count of turns that have ended."""

    def __init__(
        self,
        env: Environment,
        spec: ServeSpec,
        sessions: Sessions,
        logs: tuple[Log, Log],
        progress: Callable[[int, int], None],
    ) -> None:
        self.clients: Clients | None = None
        self.error: Exception | None = None
        self.done = env.event()
        self._env = env
        self._spec = spec
        self._progress = progress
        self._n_ended, self._n_turns = 0, len(sessions.turns)
        if not self._n_turns:
            raise ValueError(f"workload: {sessions.source} has no turns to serve")
        self.block_tokens = _block_tokens(spec.options, sessions)
        self.servers = [
            self._server(env, index, hardware, logs) for index, hardware in enumerate(spec.machines)
        ]
        self._rates = [_Rates(env, server) for server in self.servers]

    def _server(
        self, env: Environment, index: int, hardware: HardwareProfile, logs: tuple[Log, Log]
    ) -> Server:
        spec, options = self._spec, self._spec.options
        switches = {"attention": options.attention, "lm_head": options.lm_head}
        plant = RaggedCosts(spec.model, hardware, **switches)
        belief = plant if spec.belief is None else RaggedCosts(spec.model, spec.belief, **switches)
        store = None
        if options.kv_store == "lru":
            sizes = store_blocks(spec.model, hardware, options, self.block_tokens)
            block_bytes = self.block_tokens * spec.model.kv_bytes_per_token
            disk = DiskSpeed(
                hardware.disk_write.bytes_per_s / block_bytes,
                hardware.disk_read.bytes_per_s / block_bytes,
            )
            store = PrefixStore(*sizes, disk)
        return Server(
            env,
            index,
            plant,
            belief,
            options,
            spec.admission,
            spec.prefix,
            kv_capacity_tokens(spec.model, hardware, options),
            store,
            self.block_tokens,
            logs,
            self._ended,
            self._failed,
        )

    def submit(self, turn: Turn) -> None:
        """Route a turn that arrives now."""
        if len(self.servers) == 1:
            self.servers[0].submit(turn)
            return
        views = [rates.view(turn) for rates in self._rates]
        self.servers[self._spec.routing.pick(views)].submit(turn)

    def _ended(self, turn: Turn) -> None:
        self._n_ended += 1
        if self._n_ended % PROGRESS_TURNS == 0 or self._n_ended == self._n_turns:
            self._progress(self._n_ended, self._n_turns)
        if self.clients is not None:
            self.clients.ended(turn)
        if self._n_ended == self._n_turns:
            self.done.succeed()

    def _failed(self, error: Exception) -> None:
        self.error = error
        if not self.done.triggered:
            self.done.succeed()

    def waits(self) -> str:
        """Who waits for what, when nothing will happen any more."""
        left = self._n_turns - self._n_ended
        machines = "; ".join(
            f"server {s.index}: {s.n_waiting} waiting, {s.n_running} running, "
            f"{s.held_tokens} of {s.capacity_tokens} tokens held"
            for s in self.servers
        )
        return (
            f"stalled at {self._env.now:.6f} s with {left} of {self._n_turns} turns left: "
            f"{machines}"
        )

    def store_counts(self) -> dict[str, int]:
        """Blocks demoted, promoted and dropped by all stores."""
        counts = dict.fromkeys(_COUNTS, 0)
        for server in self.servers:
            if server.store is not None:
                for name in counts:
                    counts[name] += getattr(server.store.counts, name)
        return counts


class _Rates:
    """What a router predicts of a machine: constant rates at a full budget."""

    def __init__(self, env: Environment, server: Server) -> None:
        self._env = env
        costs, budget = server.belief, server.options.budget_tokens
        n_layers, h2d = costs.model.n_layers, costs.hardware.h2d
        self._server = server
        self._load_s = n_layers * costs.layer_copy_seconds(h2d, budget) / budget
        self._compute_s = costs.layers_seconds(budget, 0.0) / budget
        self._flops_per_s = prefill_flops_per_token(costs.model) / self._compute_s

    def view(self, turn: Turn) -> MachineView:
        """The machine for a turn that arrives now."""
        server = self._server
        request = server.resolve(turn)
        cached, new = server.ahead_tokens()
        return MachineView(
            name=server.plant.hardware.name,
            request=request,
            kappa_crit=self._compute_s / self._load_s,
            link_bytes_per_s=server.belief.hardware.h2d.bytes_per_s,
            compute_flops_per_s=self._flops_per_s,
            wait_s=max(0.0, server.busy_until_s - self._env.now) + self._seconds(cached, new),
            run_s=self._seconds(request.n_cached, request.n_prefill),
        )

    def _seconds(self, n_cached: int, n_new: int) -> float:
        load, compute = n_cached * self._load_s, n_new * self._compute_s
        return max(load, compute) if self._server.options.overlap else load + compute


def _block_tokens(options: ServeOptions, sessions: Sessions) -> int:
    fixed = sessions.block_tokens
    if fixed is not None and options.block_tokens not in (None, fixed):
        raise ValueError(
            f"serve.block_tokens: {options.block_tokens} must be {fixed} (or null): the hash ids "
            f"of {sessions.source} stand for blocks of that size"
        )
    return options.block_tokens or fixed or BLOCK_TOKENS
