"""Rewards of a step: each is its own sample's, whatever order they end in, and of its own step."""

from concurrent.futures import Future
from types import SimpleNamespace

from tailrace.app.train import step_rewards
from tailrace.app.train.rewards import Reward
from tailrace.app.train.step_rewards import StepRewards
from tailrace.app.train.task import Question


class Pool:
    """Rewards that end when a test says so: `ended` gives each its completion's number."""

    def __init__(self):
        self.futures: dict[tuple[str, str], Future] = {}

    def submit(self, question: Question, completion: str) -> Future:
        return self.futures.setdefault((question.question_id, completion), Future())

    def end(self, question_id: str, completion: str, value: float | None) -> None:
        outcome = "failed" if value is None else "ok"
        self.futures[question_id, completion].set_result(Reward(value, outcome))


def group_of(step: int, place: int, texts: list[str]) -> SimpleNamespace:
    samples = tuple(SimpleNamespace(token_ids=tuple(map(ord, text))) for text in texts)
    return SimpleNamespace(step=step, prompt_id=str(place), samples=samples)


class Client:
    def __init__(self):
        self.recorded: list[tuple[int, str, list[float]]] = []

    def record_rewards_blocking(self, group, values) -> None:
        self.recorded.append((group.step, group.prompt_id, values))


def rewards_of(pool: Pool, client: Client) -> StepRewards:
    return StepRewards(
        pool=pool,
        client=client,
        question_of=lambda step, place: Question(f"q{step}.{place}", "text", None),
        decode=lambda token_ids: "".join(map(chr, token_ids)),
    )


def asked(rewards: StepRewards, step: int, place: int, count: int) -> list[float]:
    return rewards.reward([], [], [], [step] * count, [place] * count)


def test_rewards_have_the_order_of_the_samples_not_that_of_their_ends():
    pool, client = Pool(), Client()
    rewards = rewards_of(pool, client)
    rewards.begin(group_of(1, 0, ["a", "b", "c"]))
    for completion, value in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        pool.end("q1.0", completion, value)
    assert asked(rewards, 1, 0, 3) == [1.0, 2.0, 3.0]
    assert client.recorded == [(1, "0", [1.0, 2.0, 3.0])]


def test_two_steps_of_one_place_have_rewards_of_their_own():
    pool, client = Pool(), Client()
    rewards = rewards_of(pool, client)
    for step in (1, 2):
        rewards.begin(group_of(step, 0, ["a"]))
        pool.end(f"q{step}.0", "a", float(step))
    assert asked(rewards, 2, 0, 1) == [2.0] and asked(rewards, 1, 0, 1) == [1.0]


def test_a_reward_that_failed_counts_nothing_and_is_counted():
    pool, client = Pool(), Client()
    rewards = rewards_of(pool, client)
    rewards.begin(group_of(1, 4, ["a", "b"]))
    pool.end("q1.4", "b", None)
    pool.end("q1.4", "a", 0.5)
    assert asked(rewards, 1, 4, 2) == [0.5, 0.0]
    taken = rewards.take()
    assert taken.outcomes == {"ok": 1, "failed": 1} and taken.values == {(1, 4): [0.5, 0.0]}
    assert rewards.take().values == {}


def test_the_wait_for_rewards_is_counted_once_a_group_and_begins_anew(monkeypatch):
    times = iter((10.0, 12.5, 20.0, 20.25, 30.0, 31.0))
    monkeypatch.setattr(step_rewards, "time", SimpleNamespace(monotonic=times.__next__))
    pool, client = Pool(), Client()
    rewards = rewards_of(pool, client)
    for place in range(3):
        rewards.begin(group_of(1, place, ["a"]))
        pool.end(f"q1.{place}", "a", 1.0)
    asked(rewards, 1, 0, 1)
    asked(rewards, 1, 1, 1)
    assert rewards.take().waited_s == 2.75
    asked(rewards, 1, 2, 1)
    assert rewards.take().waited_s == 1.0


def test_the_longest_sample_of_each_question_is_by_its_name():
    pool, client = Pool(), Client()
    rewards = rewards_of(pool, client)
    for place, texts in ((0, ["a", "bbb", "cc"]), (5, ["d"])):
        rewards.begin(group_of(1, place, texts))
        for text in texts:
            pool.end(f"q1.{place}", text, 1.0)
        asked(rewards, 1, place, len(texts))
    taken = rewards.take()
    assert rewards.longest(taken) == {"q1.0": 3, "q1.5": 1}
    assert [*taken.groups] == [(1, 0), (1, 5)]
