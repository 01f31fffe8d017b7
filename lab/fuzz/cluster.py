"""A simulated Serve application: engine replicas, a coordinator, KV pool and group context, and Serve's controller.

The controller does what Serve's does as far as it matters here: it probes health, replaces dead replicas, and scales.
"""

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.batches.token_log import TokenLog
from tailrace.deployments.context.service import ContextService
from tailrace.deployments.coordinator.coordinator import Coordinator
from tailrace.deployments.coordinator.engine_client import EngineClient
from tailrace.deployments.coordinator.rollouts import Rollouts
from tailrace.deployments.messages.delivery import WINDOW_BYTES
from tailrace.deployments.telemetry import Telemetry
from tailrace.lab.fuzz.actors import SimulatedMaster
from tailrace.lab.fuzz.disk import Disk, digest_of
from tailrace.lab.fuzz.handles import ActorHandle, EngineHandle, IngressHandle
from tailrace.lab.fuzz.lines import SimulatedLines
from tailrace.lab.fuzz.log_disk import LogDisk
from tailrace.lab.fuzz.odd.culprits import MAX_WAIT_STEPS, Culprits
from tailrace.lab.fuzz.replica import ILLEGAL_ACCESS, SimulatedReplica
from tailrace.lab.fuzz.shards import SimulatedShards, config_of
from tailrace.lab.fuzz.stepper import SimulatedStepper
from tailrace.lab.fuzz.token_law import VOCABULARY, TokenLaw
from tailrace.lab.fuzz.virtual_time import Process
from tailrace.lab.fuzz.worlds.quota_account import AccountedCoordinator, QuotaAccount
from tailrace.lab.fuzz.worlds.watched_core import WatchedCore
from tailrace.lab.fuzz.worlds.watched_pool import WatchedPool
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies

HEALTH_S = 2.0
FAILED_CHECKS = 3
"""Number of failed probes in a row after which Serve replaces a replica."""

BOOT_S = (2.0, 30.0)
GRACE_S = 20.0


@dataclass(frozen=True)
class Size:
    """Parts of a cluster and their sizes. `limits`: min and max replicas, or None if their number is fixed."""

    replicas: int
    limits: tuple[int, int] | None
    pooled: bool
    contexts: bool
    mean_tokens: int
    step_tokens: int
    step_s: float
    kv_capacity_blocks: int
    policies: dict
    window_bytes: int = WINDOW_BYTES
    quotas: dict = field(default_factory=dict)
    methods: tuple[str, ...] = ()  # of drafts, that replicas offer
    draft_tokens: int = 0
    noise: float = 0.0

    @property
    def law(self) -> TokenLaw:
        return TokenLaw(self.mean_tokens, self.noise)


class Numbers:
    """A tokenizer whose text is its token ids."""

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, token_ids, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]


class SimulatedPrompts(Prompts):
    def __init__(self):
        self._tokenizer, self._vocabulary, self._ends = Numbers(), VOCABULARY, frozenset()
        self.model, self.tokenizer_name, self.max_model_len, self.is_multimodal = "simulated", "", 512, True


class SimulatedCoordinator(Coordinator.func_or_class):
    """The Serve shell of the coordinator, with collaborators that exist already."""

    def __init__(
        self,
        engines: EngineClient,
        pool: WatchedPool | None,
        shards: SimulatedShards | None,
        telemetry: Telemetry,
        token_log: TokenLog,
        nonce: str,
        disk: Disk,
        limits: Limits | None,
    ):
        self.token_log = token_log
        self._start(
            nonce=nonce,
            engines=engines,
            prompts=SimulatedPrompts(),
            telemetry=telemetry,
            kv_pool_manager=pool,
            context=ContextService(shards, shards.config) if shards is not None else None,
            token_log=token_log,
            limits=limits,
        )
        self._rollouts.adapters.read = lambda path: digest_of(disk.read(path))

    @property
    def rollouts(self) -> Rollouts:
        return self._rollouts


class SimulatedCluster:
    """A simulated application, see above. `rng`: decides latencies and boot times. `history`: a folder for the group
    context's history."""

    def __init__(
        self, size: Size, rng: Random, log_disk: LogDisk, history: Path | None = None, culprits: Culprits | None = None
    ):
        self.size, self._rng, self.log_disk = size, rng, log_disk
        self._now = asyncio.get_running_loop().time
        self.telemetry = Telemetry("fuzz")
        self.disk = Disk({"start": "start"})
        self.replicas: dict[str, SimulatedReplica] = {}
        self.gone: list[SimulatedReplica] = []  # killed, or stopped, but for those that a deadly sample has ended
        self.culprits = culprits or Culprits()
        self.culprits.offers = max(1, len(size.methods))
        self.deadly: set[int] = set()  # keys of samples that end each engine that runs them
        self.wanted = size.replicas
        self._booting = 0
        self._made = 0
        self._engines = EngineHandle(self.replicas, Random(rng.random()))
        self.lines = SimulatedLines(Random(rng.random()))
        self.master = self.shards = self.pool = None
        if size.pooled:
            self.master_process = Process("master")
            self.master = SimulatedMaster()
        self.coordinator: SimulatedCoordinator | None = None
        self.account: QuotaAccount | None = None  # of the present coordinator, in a run with quotas
        self.coordinator_process: Process | None = None
        self.coordinators = 0
        self.version = 0  # of the last coordinator that was killed
        self.forgetful = False  # the next one began while no replica knew the content of that version
        self.defects: list[str] = []  # observations that no run may make
        self.one_version = False  # True if each sample of a batch has to end under the weights that it began with
        self._up = asyncio.Event()
        self.policies = Policies(**size.policies)
        self.controller = Process("controller")
        if size.contexts:
            shards = Random(rng.random())
            self.shards = SimulatedShards(config_of(shards, history), shards, self.controller.spawn)
        self.controller.spawn(self._control())
        self.controller.spawn(self._start_coordinator(0.0))
        for _ in range(size.replicas):
            self.boot(0.1)

    def handle(self) -> IngressHandle:
        return IngressHandle(self._present)

    async def _present(self):
        await self._up.wait()
        return self.coordinator_process, self.accounted

    # ---- engine replicas -----------------------------------------------------------------------------

    def boot(self, after_s: float | None = None) -> None:
        """Starts one more engine replica."""
        self._booting += 1
        self.controller.spawn(self._boot(self._rng.uniform(*BOOT_S) if after_s is None else after_s))

    async def _boot(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._booting -= 1
        self._made += 1
        name = f"r{self._made}"
        stepper = SimulatedStepper(
            replica_id=name,
            disk=self.disk,
            law=self.size.law,
            step_tokens=self.size.step_tokens,
            kv_capacity_blocks=self.size.kv_capacity_blocks,
            pool=self.master,
            now=self._now,
            culprits=self.culprits,
        )
        stepper.offer(self.size.methods, self.size.draft_tokens)
        step_s = self.size.step_s * (Random(name).uniform(0.5, 2.0) if self.size.methods else 1.0)
        about = name, stepper, step_s, self.telemetry, self._now()
        self.replicas[name] = SimulatedReplica(*about, self.lines.dial, self.deadly)

    def kill(self, name: str) -> None:
        replica = self.replicas.pop(name)
        replica.kill()
        self.culprits.excuses += 1
        if not replica.loop.ended_by_sample:
            self.gone.append(replica)

    async def _stop(self, replica: SimulatedReplica) -> None:
        """Stops a replica gracefully: it gets no new call, and time for the calls in flight."""
        replica.stopping = True
        for _ in range(int(GRACE_S)):
            await asyncio.sleep(1.0)
            if not replica.stepper.busy:
                break
        if self.replicas.get(replica.name) is replica:
            self.kill(replica.name)

    # ---- the coordinator -----------------------------------------------------------------------------

    def kill_coordinator(self, away_s: float | None = None) -> None:
        """Kills the coordinator. `away_s`: seconds until the next one begins; by default 1 to 10."""
        if self._up.is_set():
            self._up.clear()
            version = self.coordinator.rollouts.status().weights_version
            self.version = version
            if self.coordinator.token_log.is_complete(version):
                self.log_disk.lose(self.coordinator.rollouts.groups(), version)
            self.coordinator_process.kill()
            self.log_disk.damage()
            self.controller.spawn(self._start_coordinator(self._rng.uniform(1.0, 10.0) if away_s is None else away_s))

    async def _start_coordinator(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        alive = [one for one in self.replicas.values() if one.loop.healthy and not one.stopping]
        versions = {one.name: one.loop.stats().weights_version for one in alive}
        known = {versions[one.name] for one in alive if one.reachable}
        self.forgetful = self.forgetful or (self.version > 0 and self.version not in known)
        self.log_disk.begin_under(max(versions.values(), default=0))
        process = Process(f"coordinator-{self.coordinators + 1}")
        self.coordinator, self.coordinator_process = await self.start_one(process), process
        self.accounted = self.coordinator
        if self.size.quotas:
            rollouts = self.coordinator.rollouts
            self.account = QuotaAccount(rollouts.deliveries.quotas, rollouts, self.defects)
            self.accounted = AccountedCoordinator(self.coordinator, self.account)
        self._up.set()

    async def start_one(self, process: Process) -> SimulatedCoordinator:
        """Returns a coordinator in a process, over all replicas."""
        self.coordinators += 1
        pool = None
        if self.master:
            handle = ActorHandle(self.master_process, self.master, Random(self._rng.random()))
            pool = self.pool = WatchedPool(handle, self.master.written, self.defects)
        token_log = TokenLog(self.log_disk.folder, "fuzz", self.log_disk.in_thread)
        nonce = f"{self.coordinators}."
        self.engine_client = engines = EngineClient(
            self._engines,
            partial(self.lines.listen, process),
            nonce,
            put=replace,  # a copy, as of another process
            running=EngineHandle.running,
        )
        limits = Limits(*self.size.limits) if self.size.limits else None
        parts = engines, pool, self.shards, self.telemetry, token_log, nonce, self.disk, limits
        coordinator = process.run(SimulatedCoordinator, *parts)
        coordinator.rollouts.core_holder._kind = partial(WatchedCore, self.defects)
        coordinator.rollouts.deliveries.window_bytes = self.size.window_bytes
        coordinator._exactness = "law" if self.size.noise else "bits"
        configuration = {"policies": self.policies.model_dump(), "quotas": self.size.quotas}
        await process.spawn(coordinator.reconfigure(configuration))
        return coordinator

    # ---- Serve's controller --------------------------------------------------------------------------

    async def _control(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            self._probe()
            self._scale()

    def _probe(self) -> None:
        for replica in list(self.replicas.values()):
            try:
                silent = max(replica.silent_until_s, replica.parted_until_s) - self._now()
                replica.shell.check_health()
                replica.failed_checks = replica.failed_checks + 1 if silent > 90.0 else 0
            except Exception:  # noqa: BLE001 - as Serve: any exception is a failed probe
                replica.failed_checks += 1
            problem = replica.loop.problem or ""
            if "a step failed" in problem and not replica.stepper.broken and ILLEGAL_ACCESS not in problem:
                self.defects.append(f"{replica.name} ended under a sample: {problem}")
            if replica.stepper.longest_wait_steps > MAX_WAIT_STEPS and not self.culprits.company:
                self.defects.append(f"a chunk on {replica.name} waited {replica.stepper.longest_wait_steps} steps")
            if replica.failed_checks >= FAILED_CHECKS:
                self.kill(replica.name)
        if self._up.is_set():
            for loop in self.coordinator.ended_loops():
                self.defects.append(f"a loop of the coordinator has ended: {loop.exception()!r}")

    def _scale(self) -> None:
        if self.size.limits is not None and self._up.is_set():
            self.wanted = int(self.coordinator.record_autoscaling_stats().get("Engine", self.wanted))
        here = [replica for replica in self.replicas.values() if not replica.stopping]
        for _ in range(self.wanted - len(here) - self._booting):
            self.boot()
        for replica in here[self.wanted :] if self.size.limits is not None else ():
            replica.stopping = True
            self.controller.spawn(self._stop(replica))
