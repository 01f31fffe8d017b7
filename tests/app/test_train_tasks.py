"""Tasks and rewards of the learner."""

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import reward_functions
from pydantic import ValidationError

from tailrace.app.errors import BadInput
from tailrace.app.files.prompts import read_prompts
from tailrace.app.train.possible_answers import check_rewards, is_possible
from tailrace.app.train.rewards import RewardPool, answer_in, score
from tailrace.app.train.task import Question, Task, TaskConfig, read_task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("chain_sum", {"max_terms": 3}), ("gcd", {}), ("spell_backward", {"max_word_len": 5})]
)
def test_a_task_of_reasoning_gym_scores_its_own_answers(name, options):
    config = TaskConfig(name=name, options=options, train=20, held_out=5)
    task = read_task(config)
    assert len(task.train) == 20 and len(task.held_out) == 5
    assert not {each.question_id for each in task.train} & {each.question_id for each in task.held_out}
    for question in task.train:
        assert score(config, question, question.answer) == 1.0
        assert score(config, question, "nothing of the kind") < 0.5
    assert read_task(config) == task, "a function of its configuration"


@pytest.mark.slow
def test_small_data_sets_give_each_question_once():
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = TaskConfig(name="chain_sum", options=digits, train=400, held_out=30)
    task = read_task(config)
    everything = [each.question_id for each in (*task.train, *task.held_out)]
    assert len(everything) == len(set(everything)) < 430, "two digits and an operator make no more"


def test_a_task_has_as_many_different_questions_as_are_asked_for():
    task = read_task(TaskConfig(name="chain_sum", options={"max_digits": 6}, train=2010, held_out=20))
    assert (len(task.train), len(task.held_out)) == (2010, 20)


def test_a_task_without_a_question_to_train_on_is_refused_by_its_source(tmp_path):
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n), "answer": n}) + "\n" for n in range(3)))
    assert len(read_task(TaskConfig(prompts=path, held_out=2)).train) == 1
    with pytest.raises(BadInput, match=f"task: {path} has 3 different questions, and 3 are to be held out"):
        read_task(TaskConfig(prompts=path, held_out=3))
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(BadInput, match=r"task: reasoning-gym's chain_sum has \d+ different"):
        read_task(TaskConfig(name="chain_sum", options=digits, train=1, held_out=1000))


def test_a_question_has_the_same_name_in_every_run(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": 2}\n\n{"prompt": "1+1=", "answer": 2}\n')
    (question,) = read_task(TaskConfig(prompts=path, held_out=0)).train
    assert (question.question_id, question.answer) == ("9265c368862d8a98", "2"), "it once, by its text"
    (bare,) = read_task(TaskConfig(prompts=path, held_out=0, chat=False, instruction=" Think.")).train
    assert (bare.question_id, bare.prompt) == ("4ce8d7c7ff2c677c", "1+1= Think.")


def test_without_the_chat_template_no_message_is_left_out(tmp_path):
    path, user = tmp_path / "chats.jsonl", {"role": "user", "content": "1+1="}
    path.write_text(json.dumps({"prompt": [user], "answer": 2}) + "\n")
    (question,) = read_task(TaskConfig(prompts=path, held_out=0, chat=False)).train
    assert question.prompt == "1+1="
    path.write_text(json.dumps({"prompt": [{"role": "system", "content": "Be brief."}, user], "answer": 2}) + "\n")
    with pytest.raises(BadInput, match="line 1: prompt: several messages need the chat template"):
        read_task(TaskConfig(prompts=path, held_out=0, chat=False))
    assert len(read_task(TaskConfig(prompts=path, held_out=0)).train[0].prompt) == 2


def test_prompts_of_a_file_with_a_pattern_for_answers(tmp_path):
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{a}+{a}=", "answer": 2 * a} for a in range(6)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    config = TaskConfig(prompts=path, chat=False, held_out=2, answer_pattern=r"-?\d+", instruction=" ")
    task = read_task(config)
    assert [each.prompt for each in task.held_out] == ["0+0= ", "1+1= "] and len(task.train) == 4
    assert score(config, task.train[0], "is it 3? no, 4") == 1.0
    assert score(config, task.train[0], "four") == 0.0


def test_the_last_match_is_the_answer():
    assert answer_in(" 12 ", None) == "12"
    assert answer_in("a=1, a=2", r"a=(\d)") == "2"
    assert answer_in("none", r"\d") is None


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 1"),
        ('{"prompt": ""}', "prompt: give text"),
        ('{"prompt": "a", "anwser": 1}', "anwser: unknown key"),
        ('{"prompt": [{"role": "user"}]}', "prompt: give text"),
        ("[]", "line 1"),
        ('{"prompt": "a"}', "line 1: answer: there is none"),
        ('{"prompt": "a", "answer": null}', "line 1: answer: there is none"),
        ('{"prompt": "a", "answer": [72]}', "line 1: answer: text or a number is needed, not list"),
        ('{"prompt": "a", "answer": true}', "line 1: answer: text or a number is needed, not bool"),
        ('{"prompt": "a", "answer": NaN}', "line 1: NaN is no number"),
        ('{"text": ["a"], "answer": 1}', "line 1: prompt: give text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, fault):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(BadInput, match=fault):
        read_task(TaskConfig(prompts=path, held_out=0))


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"name": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"name": "chain_sum", "options": {"no_such": 1}}, "task.options: chain_sum does not take them"),
        ({"name": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}}, "task.options"),
    ],
)
def test_a_task_that_is_not_there_is_named(config, fault):
    with pytest.raises(BadInput, match=fault):
        read_task(TaskConfig(**config))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"name": "gcd", "prompts": "x"},
        {"prompts": "x", "options": {"a": 1}},
        {"name": "gcd", "answer_pattern": "("},
    ],
)
def test_a_task_has_one_source_and_a_sound_pattern(config):
    with pytest.raises(ValidationError):
        TaskConfig(**config)


@pytest.mark.slow
def test_rewards_that_raise_hang_die_or_are_no_numbers_are_counted_values(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setattr(reward_functions, "FINE", 9.0)  # of this process: the pool's are not forked from it
    pool = RewardPool(TaskConfig(name="gcd", reward="reward_functions:trouble"), workers=2, timeout_s=3.0)
    question = Question("q", "prompt", "answer")
    try:
        kinds = ("fine", "raise", "exit", "nan", "text", "hang", "true")
        found = [future.result() for future in [pool.submit(question, kind) for kind in kinds]]
    finally:
        pool.close()
    assert [reward.outcome for reward in found] == ["ok", "failed", "failed", "failed", "failed", "timed_out", "ok"]
    assert [reward.value for reward in found] == [0.5, None, None, None, None, None, 1.0]
    assert "no such tool" in found[1].error and "\n" not in found[1].error
    assert found[3].error == "a reward is a finite number, not nan"
    assert found[4].error.startswith("a reward is a finite number, not 'high") and len(found[4].error) == 200
    assert found[5].error == "no reward within 3.0 s" and found[0].error is None
    assert all(reward.seconds > 0.0 for reward in found)
    assert pool.counts == {"ok": 2, "failed": 4, "timed_out": 1}


class Mute(Exception):
    """A value, or an error, that cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("raised", "value", "fault"),
    [(None, 10**400, "OverflowError"), (None, Mute(), "RuntimeError"), (Mute(), None, "RuntimeError")],
    ids=["huge", "value", "error"],
)
def test_a_reward_that_cannot_be_read_is_failed_and_not_waited_for(raised, value, fault):
    computed = Future()
    computed.set_exception(raised) if raised else computed.set_result(value)
    pool = RewardPool(TaskConfig(name="gcd"), workers=1, timeout_s=1.0)
    pool._pool = SimpleNamespace(schedule=lambda *_, **__: computed)
    found = pool.submit(Question("q", "prompt", "answer"), "completion").result(timeout=0)
    assert (found.value, found.outcome, pool.counts) == (None, "failed", {"failed": 1})
    assert found.error == f"a reward is a finite number; reading it raised {fault}"


def test_a_function_of_a_user_gets_the_prompt_the_completion_and_the_answer(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setattr(reward_functions, "length", lambda *given: given)
    config = TaskConfig(name="gcd", reward="reward_functions:length")
    assert score(config, Question("q", "prompt", "answer"), "completion") == ("prompt", "completion", "answer")


@pytest.mark.parametrize(
    "path", ["no_such_package:reward", "reward_functions:no_such", "reward_functions", "json:__name__"]
)
def test_a_function_that_is_not_there_is_refused_before_anything_starts(path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    with pytest.raises(BadInput, match=r"task\.reward"):
        RewardPool(TaskConfig(name="gcd", reward=path), workers=1, timeout_s=1.0)


GSM8K = {"question": "How many clips?", "answer": "48 + 24 = <<48+24=72>>1,072 clips.\n#### 1,072"}
DAPO = {
    "data_source": "math_dapo", "prompt": [{"role": "user", "content": "How many?"}], "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "9a9b"},
}  # fmt: skip
MATH = {"problem": "How many?", "solution": "7", "level": "Level 2", "subject": "Algebra"}


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        (GSM8K, "How many clips?", "1072"),
        (DAPO, [{"role": "user", "content": "How many?"}], "34"),
        (MATH, "How many?", "7"),
        ({"messages": [{"role": "user", "content": "a"}], "answer": 5}, [{"role": "user", "content": "a"}], "5"),
        ({"text": "a", "ground_truth": 2.5}, "a", "2.5"),
        ({"prompt": "a", "answer": "## 3 is no final answer\n####"}, "a", "## 3 is no final answer\n####"),
    ],
)
def test_rows_of_well_known_data_sets_are_taken(tmp_path, row, prompt, answer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (question,) = read_task(TaskConfig(prompts=path, held_out=0)).train
    wanted = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    assert (question.prompt, question.answer) == (wanted, answer)
    (group,) = read_prompts(path, {"samples": 2})
    given = group.text if isinstance(prompt, str) else [message.model_dump() for message in group.messages]
    assert given == prompt and group.samples == 2


@pytest.mark.parametrize(
    ("pattern", "answer", "possible"),
    [
        (None, "72", True), (None, " 72", False), (r"#### (-?\d+)", "72", True), (r"#### (-?\d+)", "x", False),
        (r"-?\d+", "72 apples", False), (r"<answer>(.*?)</answer>", "a b", True), (r"(?<=#### )\d+", "72", True),
        (r"(?:a|b): ([^\])(]+)", "c", True), (r"(?:a|b): ([^\])(]+)", "(", False), (r"\((?P<n>\d+)\)", "7", True),
        (r"[(]([]a])", "]", True), (r"(?i)answer: ([a-d])", "C", True), (r"answer: ([a-d])", "C", False),
    ],
)  # fmt: skip
def test_an_answer_is_possible_unless_the_pattern_never_gives_it(tmp_path, pattern, answer, possible):
    assert is_possible(answer, pattern) is possible
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": answer}))
    config = TaskConfig(prompts=path, held_out=0, answer_pattern=pattern)
    if possible:
        assert check_rewards(config, read_task(config)) is None
    else:
        with pytest.raises(BadInput, match=r"task.answer_pattern: .* never gives an answer such as"):
            check_rewards(config, read_task(config))
        free = config.model_copy(update={"reward": "reward_functions:broken"})
        assert check_rewards(free, read_task(free)) is None


def test_some_answers_that_are_never_given_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n), "answer": n if n else "none"}) + "\n" for n in range(4)))
    config = TaskConfig(prompts=path, held_out=1, answer_pattern=r"\d+")
    assert "1 of 4 answers are never given" in check_rewards(config, read_task(config))


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("reward", "write package.module:function"),
        ("a.b:", "write package"),
        ("no_such_one:f", "there is no package no_s"),
    ],
)
def test_a_reward_that_is_no_function_is_named(reward, said):
    with pytest.raises(BadInput, match=f"task.reward: {reward}.*{said}"):
        check_rewards(TaskConfig(name="gcd", reward=reward), Task((), ()))
