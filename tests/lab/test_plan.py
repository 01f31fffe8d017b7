"""Which parallelism to run: every way is priced by the simulator's own step model, and the file is one we read."""

import json
from dataclasses import replace

import pytest
import yaml
from click.testing import CliRunner

from tailrace.app.config import load_config
from tailrace.app.errors import BadInput
from tailrace.lab.commands.plan import MOST_DRAFTS, command
from tailrace.lab.simulator.bounds import bounds, reachable_s
from tailrace.lab.simulator.hardware import MODELS, REDUCE_S, replica_model
from tailrace.lab.simulator.parallelism import Parallelism, parallelisms_of, replica_of
from tailrace.lab.simulator.planned_service import MARK, planned_file
from tailrace.lab.simulator.priced_parallelism import best, own_size, priced
from tailrace.lab.simulator.scenario import FOLDER, Known, load_scenario, scenario_names
from tailrace.lab.simulator.systems import Setup, system
from tailrace.lab.simulator.types import Gap, WorkloadGroup
from tailrace.policies.families.goodput import Goodput


def planned(scenario, seeds: int = 1):
    draws = [scenario.workload(seed).steps[0] for seed in range(seeds)]
    divided = parallelisms_of(scenario.model.value, scenario.gpus.value, scenario.gpus_per_node.value)
    acceptance = scenario.drafting()[0].acceptance
    return [priced(scenario.gpu.value, scenario.model.value, one, draws, acceptance, MOST_DRAFTS) for one in divided]


def asked(*arguments: str) -> dict:
    result = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", scenario_names())
def test_ways_use_the_gpus_there_are(name):
    scenario = load_scenario(name)
    gpus, node = scenario.gpus.value, scenario.gpus_per_node.value
    ways = list(parallelisms_of(scenario.model.value, gpus, node))
    assert len(set(ways)) == len(ways)
    for one in ways:
        assert 0 < one.replicas * one.gpus_per_replica <= gpus and one.tensor <= node
        assert one.data == one.replicas * one.gpus_per_replica // one.tensor
        assert one.expert <= max(1, MODELS[scenario.model.value].experts)
    assert any(one.gpus_per_replica == scenario.gpus_per_replica.value for one in ways)


def test_a_number_of_gpus_that_is_no_power_of_two_is_a_way_too():
    assert [one.gpus_per_replica for one in parallelisms_of("Qwen3-14B", 6, 8)] == [1, 2, 4, 6]
    assert [one.replicas for one in parallelisms_of("Qwen3-14B", 6, 8)] == [6, 3, 1, 1]


@pytest.mark.slow
def test_the_set_up_s_own_size_has_the_simulator_s_bounds():
    scenario = load_scenario("das-7b-16k").scaled(0.125)
    run = Setup.of(scenario, 0).run("routed_drafts", system("routed_drafts"), 0)
    own = own_size(planned(scenario), scenario.gpus_per_replica.value)
    assert own.costs.total_s == pytest.approx(reachable_s(run.bounds))
    for key in ("work_s", "longest_s", "memory_s"):
        assert getattr(own.costs, key) == pytest.approx(run.bounds[key])


def test_a_mixture_s_own_size_shares_experts_and_not_attention():
    scenario = load_scenario("kimi-k2").scaled(0.125)
    assert own_size(planned(scenario), 32).parallelism == Parallelism(1, 32, 1)
    assert replica_of("H800", "Kimi-K2", Parallelism(1, 32, 1)) == replica_model("H800", "Kimi-K2", 32)


def test_costs_are_means_over_draws():
    scenario = load_scenario("ppo-32b").scaled(1 / 64)
    one, other = (bounds(scenario.workload(seed).steps[0], _cluster(scenario)) for seed in range(2))
    draws = [scenario.workload(seed).steps[0] for seed in range(2)]
    found = priced("H800", "Qwen2.5-32B", Parallelism(4, 1, 1), draws, None, 0).costs
    assert found.longest_s == pytest.approx((one["longest_s"] + other["longest_s"]) / 2)
    assert found.samples == 64 and found.running == 64


def _cluster(scenario):
    return Setup.of(scenario, 0).cluster


def test_gpus_that_share_attention_repeat_kv_that_has_no_more_heads():
    """Latent KV has no heads, Qwen2.5-7B has four; the others have eight, enough for a node."""
    for model, parts in (("Moonlight-16B-A3B", 1), ("Qwen2.5-7B", 4), ("Qwen3-14B", 8)):
        known, replica = MODELS[model], replica_model("H100", model, 8, share_attention=True)
        assert replica.step.context_s == pytest.approx(known.kv_bytes / (3.35e12 * 0.8 * parts), rel=1e-9)
        free_bytes = 8 * 80e9 * 0.9 - known.parameters * known.parameter_bytes
        assert replica.kv_capacity_tokens == int(free_bytes / (known.kv_bytes * 8 // parts))


def test_a_mixture_that_shares_attention_reads_every_weight_once():
    apart, shared = (replica_model("H100", "Moonlight-16B-A3B", 8, share_attention=share) for share in (False, True))
    known = MODELS["Moonlight-16B-A3B"]
    rest_s = (known.parameters - known.expert_parameters) * 2 / (3.35e12 * 0.8)
    assert shared.step.base_s == pytest.approx(3e-3 + 2 * known.layers * REDUCE_S + rest_s / 8)
    assert shared.step.experts_s == apart.step.experts_s and shared.max_running == apart.max_running / 8
    assert apart.step.base_s > rest_s and apart.kv_capacity_tokens > shared.kv_capacity_tokens


def test_what_does_not_fit_says_why():
    ways = planned(load_scenario("kimi-k2").scaled(0.125))
    assert all("does not fit" in one.problem for one in ways if one.costs is None)
    assert {one.parallelism.expert for one in ways if one.costs is None} == {1, 2, 4, 8, 16}
    scenario = load_scenario("dapo-32b").scaled(1 / 64)
    long = scenario.model_copy(update={"prompt_tokens": Known(value=30_000, assumed="a book")})
    assert "a sample of" in planned(long)[0].problem, "26,702 tokens of KV on one GPU"


def test_a_context_has_what_tools_answer():
    """Of answers of 100 tokens, with 4,000 tokens of a tool after the first 50."""
    plain = WorkloadGroup("g", 100, (100, 100))
    turns = replace(plain, gaps=((Gap(50, 1.0, 4_000),),) * 2)
    room = replica_model("H100", "Qwen3-8B", 1).kv_capacity_tokens
    alone, held = (
        priced("H100", "Qwen3-8B", Parallelism(1, 1, 1), [[group] * 1_000], None, 0).costs for group in (plain, turns)
    )
    assert (alone.running, held.running) == (min(1_024, room // 150), room // (150 + 2_000))
    longer = replace(turns, gaps=((Gap(50, 1.0, room),),) * 2)
    problem = priced("H100", "Qwen3-8B", Parallelism(1, 1, 1), [[longer]], None, 0).problem
    assert f"{200 + room:,} tokens does not fit" in problem


def test_the_best_has_the_least_work_and_longest():
    scenario = load_scenario("moonlight").scaled(0.25)
    ways = planned(scenario.model_copy(update={"prompts": Known(value=40, assumed="quicker")}))
    least = best(ways)
    assert least.costs.total_s == min(one.costs.total_s for one in ways if one.costs)
    served = best(ways, served=True)
    assert served.served and not least.served and served.costs.total_s >= least.costs.total_s
    assert best([replace(one, costs=None) for one in ways]) is None


@pytest.mark.slow
def test_the_simulator_agrees_on_the_size_of_a_replica():
    """The plan has TP8 faster than TP4 on ppo-32b, 1.29 times on the whole cluster, and TP2 slower."""
    scenario = load_scenario("ppo-32b").scaled(1 / 8)
    makespans = {}
    for size in (2, 4, 8):
        sized = scenario.model_copy(update={"gpus_per_replica": Known(value=size, assumed="tried")})
        makespans[size] = Setup.of(sized, 0).run("routed_drafts", system("routed_drafts"), 0).makespan_s
    totals = {one.parallelism.tensor: one.costs.total_s for one in planned(scenario)}
    assert makespans[8] < makespans[4] < makespans[2]
    for size in (2, 8):
        assert makespans[4] / makespans[size] == pytest.approx(totals[4] / totals[size], rel=0.15)


@pytest.mark.parametrize("name", [name for name in scenario_names() if name != "kimi-k2"])
def test_the_file_is_one_that_the_service_reads(name, tmp_path):
    scenario = load_scenario(name)
    scenario = scenario.scaled(8 / scenario.gpus.value)
    scenario = scenario.model_copy(update={"prompts": Known(value=4, assumed="quicker")})
    served = best(planned(scenario), served=True)
    path = tmp_path / "serve.yaml"
    path.write_text(planned_file(served, scenario))
    args = load_config(path).application.args
    assert args.replicas.max == served.parallelism.replicas
    assert args.engine.tensor_parallel == served.parallelism.tensor
    assert args.engine.max_model_len >= scenario.prompt_tokens.value + scenario.max_tokens.value
    assert path.read_text().startswith(MARK)


def test_experts_over_one_node_are_a_file_with_vllm_s_own_argument():
    scenario = load_scenario("moonlight").scaled(0.25)
    scenario = scenario.model_copy(update={"prompts": Known(value=4, assumed="enough for a file")})
    shared = next(one for one in planned(scenario) if one.parallelism.tensor == 8)
    engine = yaml.safe_load(planned_file(shared, scenario))["applications"][0]["args"]["engine"]
    assert engine["tensor_parallel"] == 8 and engine["vllm_args"] == {"enable_expert_parallel": True}
    apart = next(one for one in planned(scenario) if one.parallelism == Parallelism(1, 8, 1))
    with pytest.raises(ValueError, match="no replica of the service"):
        planned_file(apart, scenario)


def test_the_command_s_answer_and_its_file(tmp_path):
    path, few = tmp_path / "mine.yaml", tmp_path / "few.yaml"
    data = yaml.safe_load((FOLDER / "das-7b-16k.yaml").read_text())
    data["prompts"]["value"] = 8
    few.write_text(yaml.safe_dump(data))
    words = ["--workload", str(few), "--gpus", "2", "--seeds", "1"]
    result = asked(*words, "--gpu", "H200", "--out", str(path))
    assert (result["gpu"], result["gpus"], result["model"]) == ("H200", 2, "DeepSeek-R1-Distill-Qwen-7B")
    assert [one["tensor"] for one in result["ways"]] == [1, 2]
    assert result["best"]["total_s"] == min(one["total_s"] for one in result["ways"])
    assert result["best"] == result["served"] and result["own"]["gpus_per_replica"] == 1
    assert load_config(path).application.args.replicas.max == result["served"]["replicas"]
    again = asked(*words, "--out", str(path))
    assert again["gpu"] == "H100", "its own file may be written over"
    said = CliRunner().invoke(command, words).stdout
    assert "the least sum: TP" in said and "work" in said


def test_the_file_s_contexts_have_room_for_what_tools_answer(tmp_path):
    path, few = tmp_path / "mine.yaml", tmp_path / "few.yaml"
    data = yaml.safe_load((FOLDER / "tools-8b.yaml").read_text())
    data["prompts"]["value"] = 2
    few.write_text(yaml.safe_dump(data))
    asked("--workload", str(few), "--gpus", "1", "--seeds", "1", "--out", str(path))
    outside = max(group.outside_tokens for group in load_scenario(str(few)).workload(0).steps[0])
    most = load_config(path).application.args.engine.max_model_len
    assert outside > 2_000 and most >= 1_500 + 16_384 + outside


@pytest.mark.slow
def test_a_trace_is_a_workload_too(tmp_path):
    samples = [{"text": "one two three " * n} for n in (4, 40)]
    line = {
        "prompt_id": "p",
        "prompt": "count " * 200,
        "answer": "3",
        "epochs": [{"policy_step": 0, "samples": samples}],
    }
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(line) + "\n")
    out = tmp_path / "serve.yaml"
    result = asked("--workload", str(path), "--model", "Qwen3-8B", "--gpus", "2", "--out", str(out))
    assert result["seeds"] == 1 and load_config(out).application.args.engine.max_model_len == 16384 + 208
    assert (result["workload"], result["model"], result["best"]["samples"]) == ("mine", "Qwen3-8B", 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "H101"], "--gpu H101: not in the step model; nearest: H100"),
        (["--model", "Qwen3-14"], "nearest: Qwen3-14B"),
        (["--workload", "moonlite"], "did you mean moonlight"),
        (["--cluster", "moonlight"], "--cluster: for recorded rollouts only"),
        (["--workload", "kimi-k2", "--gpus", "8", "--out", "{folder}/x.yaml"], "no way that fits on 8 H800"),
        (["--out", "{folder}/notes.txt"], "is there and is not a file of `tailrace plan --out`"),
    ],
)
def test_one_line_on_bad_input(arguments, said, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    arguments = [one.format(folder=tmp_path) for one in arguments]
    with pytest.raises(BadInput) as refused:
        command([*arguments, "--seeds", "1"], standalone_mode=False)
    assert said in str(refused.value)
    assert (tmp_path / "notes.txt").read_text() == "mine" and not (tmp_path / "x.yaml").exists()


def test_drafts_are_those_of_the_default_policy():
    assert Goodput().max_draft_tokens == MOST_DRAFTS
