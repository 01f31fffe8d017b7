"""A run of the learner: TRL's GRPO trainer over samples of the service, step by step, into a folder.

A run that is stopped continues from its last checkpoint. Groups that had ended since are read from the folder, and
tokens are functions of keys, so the weights come out the same; in the mode `bounded`, an update may meet the rest of
the samples at other places, and in `bounded_groups` samples that are not trained on are made again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from trl import GRPOConfig

from tailrace.app.calls.client import RolloutClient
from tailrace.app.errors import BadInput
from tailrace.app.model import resolve_model
from tailrace.app.train.evaluation import HeldOut
from tailrace.app.train.feed.group_feed import GroupFeed
from tailrace.app.train.feed.modes import Mode, lookahead_of
from tailrace.app.train.feed.step_feed import StepFeed
from tailrace.app.train.gradients.freed_memory import keep_freed_memory
from tailrace.app.train.gradients.gradient_order import by_expected_length
from tailrace.app.train.group_trainer import GroupTrainer
from tailrace.app.train.question_order import QuestionOrder, QuestionOrderName
from tailrace.app.train.record.accuracy import Accuracy, described
from tailrace.app.train.record.ledger import LedgerRow
from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.record.sent_weights import SentWeights
from tailrace.app.train.record.stored_groups import ANY_WEIGHTS, StoredGroups, store_groups
from tailrace.app.train.replica_seconds import ReplicaSeconds
from tailrace.app.train.rewards import RewardPool
from tailrace.app.train.step_recorder import RunFiles, StepRecorder
from tailrace.app.train.step_rewards import StepRewards
from tailrace.app.train.task import Question, Task
from tailrace.app.train.train_config import TrainConfig
from tailrace.app.train.trl_settings import defaults, settings_of
from tailrace.app.trl.weights_sender import WeightsSender
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import PromptGroup, WeightsLoaded


@dataclass(frozen=True)
class TrainingResult:
    """`accuracies`: accuracies on held-out questions, by step; empty if none are held out."""

    rows: list[LedgerRow]
    accuracies: list[Accuracy]


Order = Callable[[Sequence[str], Mapping[str, int]], tuple[int, ...]]
"""Returns the places of a step's gradients in order, from the ids of its questions and the known lengths."""


def train(
    client: RolloutClient,
    config: TrainConfig,
    task: Task,
    folder: RunFolder,
    say: Callable[[str], None],
    order: Order = by_expected_length,
) -> TrainingResult:
    """Trains to `config.steps`, counted over all starts. Raises BadInput for settings that TRL does not accept."""
    begun, checkpoint = folder.resume()
    if begun < config.steps:
        run = _Run(client=client, config=config, task=task, folder=folder, say=say, order=order)
        try:
            run.go(str(checkpoint) if checkpoint else None)
        finally:
            run.close()
    return TrainingResult(folder.ledger.rows, folder.accuracies.rows)


class _Run:
    def __init__(self, *, client, config: TrainConfig, task: Task, folder: RunFolder, say, order: Order):
        self._client, self._config, self._task, self._folder = client, config, task, folder
        self._say, self._order_by = say, order
        self._questions = lru_cache(maxsize=8)(self._question_order().of)
        torch.set_num_threads(config.trainer.threads)
        keep_freed_memory()
        model = str(resolve_model(config.model))
        tokenizer = AutoTokenizer.from_pretrained(model)
        ours = settings_of(config, str(folder.checkpoints))
        try:
            arguments = GRPOConfig(**defaults() | config.trl | ours)
        except (TypeError, ValueError) as error:
            raise BadInput(f"trl: trl.GRPOConfig does not take these settings: {one_line(error)}") from error
        self._pool = RewardPool(config.task, config.rewards.workers, config.rewards.timeout_s)
        rewards = StepRewards(
            self._pool,
            client,
            question_of=lambda step, place: self._questions(step)[place],
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )
        self._trainer = GroupTrainer(
            model,
            reward_funcs=rewards.reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "unused"}] * config.groups),
            processing_class=tokenizer,
        )
        for callback in (PrinterCallback, ProgressCallback):
            self._trainer.remove_callback(callback)
        self._weights = WeightsSender(self._trainer, client, config.weights_dir, self._note_weights)
        self._feed = self._feed_of(rewards)
        self._trainer.feed_by(
            self._feed,
            row_of=self._row,
            order_of=self._order,
            on_policy=lookahead_of(config.mode, config.max_staleness).on_policy,
            settings=config.trainer,
            before_group=self._before_group,
        )
        self._replicas = ReplicaSeconds(client)  # its thread ends with the run, which what is above may refuse
        self._trainer.add_callback(self._recorder(rewards))

    def go(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            self._evaluate(0)
        else:
            self._say(f"continuing from {checkpoint}")
        self._trainer.train(resume_from_checkpoint=checkpoint)

    def close(self) -> None:
        """Ends the samples that run, and every process and thread of the run."""
        self._feed.close()
        self._trainer.close()
        self._replicas.close()
        self._pool.close()

    def _feed_of(self, rewards: StepRewards) -> StepFeed:
        lookahead = lookahead_of(self._config.mode, self._config.max_staleness)
        of_steps = {
            "client": self._client,
            "weights": self._weights,
            "lookahead": lookahead,
            "groups_of": self._prompts,
            "on_group": rewards.begin,
            "steps": self._config.steps,
            "seed": self._config.seed,
        }
        if self._config.mode is Mode.BOUNDED_GROUPS:
            return GroupFeed(
                size=self._config.groups,
                trained={question for row in self._folder.ledger.rows for question in row.taken},
                keep=partial(store_groups, self._folder.rollouts),
                roll_out=self._client.rollout_blocking,
                **of_steps,
            )
        stored = StoredGroups(
            self._folder.rollouts,
            self._client.rollout_blocking,
            lambda: self._weights.digest if lookahead.on_policy else ANY_WEIGHTS,
        )
        return StepFeed(roll_out=stored.groups_of, **of_steps)

    def _recorder(self, rewards: StepRewards) -> StepRecorder:
        return StepRecorder(
            config=self._config,
            trainer=self._trainer,
            feed=self._feed,
            rewards=rewards,
            replicas=self._replicas,
            files=RunFiles(self._folder.sent, self._folder.ledger),
            after_step=self._after_step,
            say=self._say,
        )

    def _before_group(self, is_last: bool) -> None:
        """Requests replicas that were given back while the last gradient is computed."""
        if is_last and self._replicas.given_back:
            self._client.reserve_blocking(self._replicas.most)

    def _prompts(self, step: int) -> list[PromptGroup]:
        config, questions = self._config, self._questions(step)
        kept = {"samples": config.samples, "max_tokens": config.max_tokens, "sampling": config.sampling}
        return [
            PromptGroup(prompt_id=str(place), token_ids=tuple(ids), **kept)
            for place, ids in enumerate(self._tokens_of(questions))
        ]

    def _row(self, step: int, place: int) -> dict:
        step, place = self._feed.question_of(step, place)
        return {"prompt": self._questions(step)[place].prompt, "step": step, "place": place}

    def _question_order(self) -> QuestionOrder:
        config = self._config
        if config.order is QuestionOrderName.SHUFFLE:
            return QuestionOrder(self._task.train, config.groups, config.seed)
        ahead = lookahead_of(config.mode, config.max_staleness).ahead
        return QuestionOrder(self._task.train, config.groups, config.seed, self._longest, ahead)

    def _order(self, step: int) -> tuple[int, ...]:
        if self._config.mode is Mode.BOUNDED_GROUPS:
            return tuple(range(self._config.groups))  # as they end
        return self._order_by([question.question_id for question in self._questions(step)], self._longest(step))

    def _longest(self, steps: int) -> dict[str, int]:
        """Returns the tokens of each question's longest sample when it came last in the first `steps` steps."""
        longest: dict[str, int] = {}
        for row in self._folder.ledger.rows[:steps]:
            longest |= row.longest
        return longest

    def _note_weights(self, step: int, loaded: WeightsLoaded) -> None:
        self._folder.sent.append(SentWeights(step=step, version=loaded.version, digest=loaded.digest))

    def _after_step(self, step: int) -> None:
        every = self._config.evaluate_every
        if step == self._config.steps or (every and step % every == 0):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        questions = self._task.held_out
        if not questions:
            return
        if lookahead_of(self._config.mode, self._config.max_staleness).drains:
            self._feed.settle()  # samples in flight must have one version
        self._feed.send_weights(step)
        held_out = HeldOut(
            self._client,
            self._pool,
            questions,
            self._tokens_of(questions),
            samples=self._config.evaluate_samples,
            max_tokens=self._config.max_tokens,
            sampling=self._config.sampling,
        )
        found = held_out.accuracy(step)
        self._folder.accuracies.append(found)
        self._say(f"step {step}: accuracy on {found.questions} held-out questions: {described(found)}")

    def _tokens_of(self, questions: tuple[Question, ...]) -> list[list[int]]:
        return self._trainer._tokenize_prompts([question.prompt for question in questions])[0]
