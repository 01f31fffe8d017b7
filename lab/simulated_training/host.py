"""The shell of a simulated training: the rollout's shell with a learner, and weights that change.

Each change of weights is a `WeightsChanged` of the core. A replica joins again once it has loaded the weights. It loads
them at once, or with `kv_on_update: finish` when the core lets it go. With `own_update` the core knows one version. A
replica then keeps its weights for samples in flight, holds samples of a later step until it runs nothing, and loads.
With `puts_off` the group of an outlier that the core moves to the next step is trained on there. Invariants: the
weights of a token of step t lack at most `ahead` updates, or one more if its group was put off, and are never of later
steps. Called by `run`.
"""

from collections import Counter
from collections.abc import Callable
from itertools import groupby

from tailrace.lab.simulated_training.busy_times import BusyTimes
from tailrace.lab.simulated_training.figures import StepCosts
from tailrace.lab.simulated_training.group_learner import GroupLearner
from tailrace.lab.simulated_training.learner import Learner, trained_tokens
from tailrace.lab.simulated_training.modes import TrainingMode
from tailrace.lab.simulator.chunks import SimulatedChunk
from tailrace.lab.simulator.fleet import ModelledFleet
from tailrace.lab.simulator.host import SimulatedHost
from tailrace.lab.simulator.replica import ModelledReplica
from tailrace.lab.simulator.types import Workload, WorkloadGroup
from tailrace.policies.families.kv_on_update import finishes
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev


class TrainingHost(SimulatedHost):
    """`train_gpus`: number of GPUs that train, while they do. The record of a run: `published_s` (seconds at which the
    weights of each step were made), `rolled_s` (seconds at which its last sample ended), `versions_of` and `busy`.
    """

    overlaps = True

    def __init__(
        self, *, workload: Workload, fleet: ModelledFleet, policies: Policies, mode: TrainingMode, costs: StepCosts,
        train_gpus: int, check: bool, progress: Callable[[int, int], None] | None = None,
    ):  # fmt: skip
        super().__init__(
            workload=workload,
            fleet=fleet,
            policies=policies,
            admission=mode.system.admission,
            reveal=False,
            elastic=None,
            spans=None,
            check=check,
            progress=progress,
        )
        piece = costs.piece_tokens * train_gpus if mode.streams else None
        self._learner = (
            GroupLearner(workload.steps, costs.reward_sample_s, piece, mode.ahead)
            if mode.by_groups
            else Learner(workload.steps, costs.reward_sample_s, piece, mode.late)
        )
        self._mode, self._costs, self._train_gpus = mode, costs, train_gpus
        self._training, self._version, self._finishes = False, 0, finishes(policies.kv_on_update)
        self._holds = [0] * len(fleet.replicas)  # versions that replicas hold or load
        self._loading = [False] * len(fleet.replicas)
        self._sent = [0] * len(fleet.replicas)  # chunks that are on a replica, or on their way to it
        self._held: list[list[tuple[SimulatedChunk, int | None]]] = [[] for _ in fleet.replicas]
        self._versions: dict[str, int] = {}  # versions of the weights that make a running chunk
        self._groups: dict[str, tuple[int, WorkloadGroup]] = {}
        self.published_s: list[float] = []
        self.versions_of: dict[tuple[int, str], list[tuple[int, int]]] = {}  # (version, tokens) of each sample's chunks
        self.busy = BusyTimes(len(fleet.replicas))

    # ---- steps -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._submit_allowed()

    def _acted(self) -> None:
        if self._mode.puts_off:
            self._put_off_outliers()
        if self._mode.own_update:
            for replica in self._fleet.replicas:
                self._load_if_idle(replica)
        if self._finishes and self._core.replicas.weights_version == self._version:
            for name, replica in self._fleet.by_id.items():
                behind = self._holds[replica.index] < self._version and not self._loading[replica.index]
                if behind and not self._core.replicas.keeps(name):
                    self._load(replica, self._now)

    def _submit_allowed(self) -> None:
        """Submits the steps that may begin: those whose training begins at most `ahead` updates after the present
        version.
        """
        if self._mode.by_groups:
            self._submit_groups()
            return
        while self._step + 1 < min(len(self._workload.steps), self._version + self._mode.ahead + 1):
            if self._mode.rounds and not self._round_over():
                return
            self._submit()
            self._groups |= {group.group_id: (self._step, group) for group in self._workload.steps[self._step]}

    def _submit_groups(self) -> None:
        """Submits the groups that may begin, one by one. The first groups of a step open its batch, and the last ones
        close it.
        """
        for step, groups in groupby(self._learner.admitted(), key=lambda pair: pair[0]):
            added = [group for _, group in groups]
            self._groups |= {group.group_id: (step, group) for group in added}
            if step != self._step:
                self._begin_step()
            is_last = added[-1] is self._workload.steps[step][-1]
            self._submit_specs(added, is_open=not is_last)

    def _round_over(self) -> bool:
        """Returns whether all submitted samples have ended, and all submitted steps but the last are trained on."""
        return not self._samples and self._learner.version >= self._step

    def _put_off_outliers(self) -> None:
        """Puts off the groups of outliers that have moved to the next step, once each."""
        for sample, where in self._core.outliers.moved.items():
            group_id = sample.group.spec.group_id
            step, group = self._groups.get(group_id, (None, None))
            if where == "next" and group is not None and step == sample.group.batch.step:
                self._groups[group_id] = step + 1, group
                self._learner.put_off(step, group)
                self._train()

    def trained_in(self, step: int, sample_id: str) -> int:
        """Returns the step in which a sample is trained on. `step`: the step that the sample came with."""
        return self._learner.trained_in.get((step, sample_id.rpartition("#")[0]), step)

    @property
    def made(self) -> Counter[tuple[int, int]]:
        """Tokens by the step in which they are trained on, and by weights version."""
        found = Counter()
        for (step, sample_id), pieces in self.versions_of.items():
            for version, tokens in pieces:
                found[self.trained_in(step, sample_id), version] += tokens
        return found

    @property
    def rolled_s(self) -> list[float]:
        """Seconds at which the last sample of each step ended."""
        return [seconds[-1] for seconds in self.ends_s()]

    def ends_s(self) -> list[list[float]]:
        """Returns the seconds at which samples ended, sorted, by the step in which they are trained on."""
        found = [[] for _ in self._workload.steps]
        for one in self._ended:
            found[self.trained_in(one.step, one.sample_id)].append(one.ended_s)
        return [sorted(seconds) for seconds in found]

    def moved_share(self) -> float:
        """Returns the share of samples that left their ranking group."""
        return sum(self._core.outliers.moves.values()) / self._total

    def other_step_share(self) -> float:
        """Returns the share of groups that were trained on in another step than they came with."""
        other = sum(step != came for (came, _), step in self._learner.trained_in.items())
        return other / sum(map(len, self._workload.steps))

    def _group_ended(self, group_id: str) -> None:
        step, group = self._groups.pop(group_id)
        for at_s, scored in self._learner.ended(step, group, self._now):
            self._at(at_s, self._scored, (step, scored.group_id))
        if self._mode.rounds and not self._learner.steps[step].unended:
            self._end_round()

    def _scored(self, scored: tuple[int, str]) -> None:
        step, group_id = scored
        self._learner.scored(step, group_id)
        self._train()

    # ---- training ----------------------------------------------------------------------------------------

    def _train(self) -> None:
        if self._training:
            return
        if self._mode.rounds and self._learner.version > self._version:
            return  # the weights of the last step are published first
        first = not self._learner.steps[min(self._learner.version, len(self._learner.steps) - 1)].taken
        if piece := self._learner.next_piece():
            seconds = sum(map(trained_tokens, piece)) * self._costs.token_gpu_s / self._train_gpus
            begin_s = self._now + (0.0 if self._mode.apart or not first else self._costs.switch_s)
            self._training = True
            self.busy.trains(begin_s, begin_s + seconds)
            self._at(begin_s + seconds, self._trained, piece)
            if self._mode.by_groups:
                self._submit_groups()

    def _trained(self, piece: list[WorkloadGroup]) -> None:
        self._training = False
        if self._learner.trained(piece):
            self.published_s.append(self._now)
            if self._mode.rounds:
                self._end_round()
            else:
                self._publish()
        self._train()

    def _end_round(self) -> None:
        """Publishes weights or submits the next step if both the rollout of a step and the training on the one before
        have ended. Called when either ends.
        """
        if self._step + 1 < len(self._workload.steps) and not self._round_over():
            return
        if self._learner.version > self._version and self._round_over():
            self._publish()
        else:
            self._submit_allowed()
        self._train()

    def _publish(self) -> None:
        """Publishes new weights: all replicas load them now, or each replica when it is free to."""
        self._version = self._learner.version
        if self._version == len(self._workload.steps):
            return
        if not self._mode.own_update:
            self._inbox.append(ev.WeightsChanged(self._now, self._version))
            for replica in self._fleet.replicas if not self._finishes else ():
                self._load(replica, replica.boundary_s(self._now))
        self._submit_allowed()

    # ---- weights -----------------------------------------------------------------------------------------

    def _load(self, replica: ModelledReplica, begin_s: float) -> None:
        self._loading[replica.index] = True
        self.busy.loads(replica.index, begin_s, begin_s + self._costs.load_s)
        self._at(begin_s + self._costs.load_s, self._loaded, (replica, self._version))

    def _loaded(self, loaded: tuple[ModelledReplica, int]) -> None:
        replica, version = loaded
        self._loading[replica.index], self._holds[replica.index] = False, version
        if not self._mode.own_update:
            if self._finishes and version < self._version:
                self._load(replica, self._now)
            elif version == self._version:
                self._inbox.append(self._fleet.rejoins(replica, version, self._admission, self._now))
            return
        replica.prompts.clear()
        held, self._held[replica.index] = self._held[replica.index], []
        touched: dict[int, None] = {}
        for chunk, min_pull_tokens in held:
            self._send(chunk, min_pull_tokens, touched)
        for index in touched:
            self._book(self._fleet.replicas[index])

    def _load_if_idle(self, replica: ModelledReplica) -> None:
        index = replica.index
        if not self._sent[index] and not self._loading[index] and self._holds[index] < self._version:
            self._load(replica, self._now)

    def _send(self, chunk: SimulatedChunk, min_pull_tokens: int | None, touched: dict[int, None]) -> None:
        index, step = chunk.replica.index, chunk.sample.progress.step
        if self._mode.own_update and (self._loading[index] or self._holds[index] < step - self._mode.ahead):
            self._held[index].append((chunk, min_pull_tokens))
            return
        if self._mode.own_update:
            chunk.stored = 0  # KV of a sample that moves is computed again: its weights may be others
        self._sent[index] += 1
        self._versions[chunk.chunk_id] = self._holds[index] if self._mode.own_update else chunk.weights_version
        super()._send(chunk, min_pull_tokens, touched)

    # ---- the record --------------------------------------------------------------------------------------

    def _turn(self, replica: ModelledReplica) -> None:
        super()._turn(replica)
        self.busy.generates(replica.index, bool(replica.running), self._now)

    def _stopped(self, chunk: SimulatedChunk) -> None:
        self._sent[chunk.replica.index] -= 1
        super()._stopped(chunk)

    def _took(self, chunk: SimulatedChunk) -> None:
        sample, version = chunk.sample, self._versions.pop(chunk.chunk_id)
        step = sample.progress.step
        self.versions_of.setdefault((step, sample.sample_id), []).append((version, int(chunk.made)))
