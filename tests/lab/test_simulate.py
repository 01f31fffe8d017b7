"""`tailrace simulate` from end to end, small: the systems by name, their laws, the same bytes for a seed."""

import json

import pytest
import yaml

from tailrace.app.cli import run
from tailrace.app.config import DEFAULT_CONFIG
from tailrace.lab.commands.simulate import claim_line
from tailrace.lab.simulator.scenario import FOLDER, Scenario, load_scenario
from tailrace.lab.simulator.systems import SYSTEMS, Setup, system
from tailrace.policies.families.registry import name_of


@pytest.fixture
def simulated(capsys, tmp_path):
    """Simulates a sixth of a replica's samples of `moonlight` on one, as a user's own workload; the JSON."""
    data = yaml.safe_load((FOLDER / "moonlight.yaml").read_text())
    data["prompts"]["value"] //= 6
    workload = tmp_path / "moonlight.yaml"
    workload.write_text(yaml.safe_dump(data))

    def simulate(*arguments) -> dict:
        assert run(["simulate", "--workload", str(workload), "--scale", "0.04", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return simulate


@pytest.mark.slow
def test_every_system_keeps_the_laws_and_stays_above_its_bound(simulated):
    names = ",".join([*(name for name, chosen in SYSTEMS.items() if not chosen.races), "config"])
    result = simulated("--compare", names, "--check")
    assert result["throughput_ratio"]["verl"] == [1.0, 1.0, 1.0]
    for name, (mean, least, greatest) in result["bound_share"].items():
        assert 0 < least <= mean <= greatest <= 1, name
    samples = {mean["samples"] for mean in result["mean"].values()}
    tokens = {mean["tokens"] for mean in result["mean"].values()}
    assert len(samples) == len(tokens) == 1, "every system makes the same tokens"
    drafted = {name for name, mean in result["mean"].items() if mean["drafted"]}
    drafts = {name for name, chosen in SYSTEMS.items() if name_of(chosen.bundle(1).drafting) != "off"}
    wanted = drafts & set(result["mean"])
    # Without history there is nothing to draft from for what reads history alone but the sample itself.
    assert drafted - {"config"} == wanted


RACING = [name for name, chosen in SYSTEMS.items() if chosen.races]


def small() -> Scenario:
    """A sixteenth of SpecActor's largest cluster, with one group for each replica."""
    scenario = load_scenario("dapo-32b").scaled(1 / 16)
    return scenario.model_copy(update={"prompts": scenario.prompts.scaled(scenario.replicas, 1.0)})


@pytest.mark.slow
@pytest.mark.parametrize("name", RACING)
def test_systems_that_race_keep_the_laws_and_their_bound(name):
    """What comes of an idle replica: a copy; or, as the group's drafts are better than these models', it goes."""
    setup = Setup.of(small(), 0)
    got = setup.run(name, system(name), 0, check=True, spans=True)
    assert got.makespan_s >= got.bounds["best_s"] and len(got.ended) == 4 * 16
    assert (min(moment.replicas for moment in got.moments) < 4) == (name in ("tailrace_auto", "tailrace_thrifty"))
    assert ("race" in {span.role for span in got.spans}) == (name == "tailrace_race")
    assert got == setup.run(name, system(name), 0, check=True, spans=True)


def test_without_draft_models_nobody_races(capsys, tmp_path):
    config = tmp_path / "races.yaml"
    config.write_text(
        (DEFAULT_CONFIG.read_text()).replace("drafting:", "racing: {type: fastest_of_n}\n            drafting:")
    )
    for names in (["tailrace_race"], ["config", "--config", str(config)]):
        assert run(["simulate", "--workload", "moonlight", "--compare", *names]) == 2
        assert "names no draft model" in capsys.readouterr().err
    with pytest.raises(ValueError, match="names no draft model"):
        Setup.of(load_scenario("moonlight").scaled(0.04), 0).run("tailrace_race", system("tailrace_race"), 0)


def test_a_configuration_races_with_the_workload_s_methods(capsys, tmp_path):
    config, workload = tmp_path / "races.yaml", tmp_path / "small.yaml"
    config.write_text(
        (DEFAULT_CONFIG.read_text()).replace("drafting:", "racing: {type: fastest_of_n}\n            drafting:")
    )
    data = yaml.safe_load((FOLDER / "dapo-32b.yaml").read_text())
    data["prompts"]["value"] = 64
    workload.write_text(yaml.safe_dump(data))
    given = ["--workload", str(workload), "--scale", "0.0625", "--compare", "config", "--config", str(config)]
    assert run(["simulate", *given, "--check", "--json"]) == 0
    (mean,) = json.loads(capsys.readouterr().out.splitlines()[-1])["mean"].values()
    assert mean["samples"] == 4 * 16 and mean["returned_replica_s"] == 0.0


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(simulated):
    one, two = (simulated("--compare", "verl,tailrace", "--seeds", seeds)["systems"] for seeds in "12")
    for name in ("verl", "tailrace"):
        assert json.dumps(one[name]) == json.dumps(two[name][:1])
        assert two[name][0]["makespan_s"] != two[name][1]["makespan_s"]


def test_lengths_are_revealed_to_the_oracles_alone():
    oracles = {name for name, chosen in SYSTEMS.items() if chosen.reveal}
    assert oracles == {"oracle", "clairvoyant"}
    bundles = {name: chosen.bundle(1) for name, chosen in SYSTEMS.items()}
    sees = {
        name for name, of in bundles.items() if name_of(of.ordering) == "oracle_longest_first" or of.lanes.sees_truth
    }
    assert sees == oracles


def test_a_page_and_a_file_are_written_and_compare_reads_the_file(simulated, capsys, tmp_path):
    page, out = tmp_path / "run.html", tmp_path / "a.json"
    result = simulated("--compare", "verl,seer", "--report", str(page), "--out", str(out))
    assert json.loads(out.read_text()) == result
    assert page.read_text().startswith("<!DOCTYPE html>") and "moonlight" in page.read_text()
    assert run(["compare", str(out), str(out), "--json"]) == 0
    ratio = json.loads(capsys.readouterr().out.splitlines()[-1])["ratio"]
    assert ratio["seer"]["makespan_s"] == [1.0, 1.0, 1.0]


def test_what_a_workload_assumes_is_listed(capsys):
    assert run(["simulate", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(SYSTEMS) < set(listed["systems"]) and "kimi-k2" in listed["workloads"]
    kinds = {note["kind"] for note in listed["moonlight"]}
    assert kinds == {"source", "assumed"} and all(note["why"] for note in listed["moonlight"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workload", "moonligt"), "moonlight"),
        (("--compare", "verl,tailrac"), "tailrace"),
        (("--compare", ","), "--compare"),
        (("--report", "/nowhere/at/all.html"), "folder"),
        (("--seeds", "0"), "--seeds"),
    ],
)
def test_bad_input_is_one_line_that_helps(capsys, arguments, said):
    assert run(["simulate", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and said in error


@pytest.mark.parametrize("policies", [{"tail": "draft"}, {"tail": "hold", "draft_models": "planned"}])
def test_a_configuration_with_draft_models_beside_engines_is_refused(capsys, tmp_path, policies):
    """Its replicas that become draft models were counted as given back."""
    config = tmp_path / "drafter.yaml"
    data = yaml.safe_load(DEFAULT_CONFIG.with_name("serve.elastic.yaml").read_text())
    args = data["applications"][0]["args"]
    args["drafter"] = {"model": "demo", "replicas": {"min": 0, "max": 1}}
    data["applications"][0]["deployments"][0]["user_config"]["policies"] |= policies
    config.write_text(yaml.safe_dump(data))
    assert run(["simulate", "--compare", "config", "--config", str(config)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and "draft models beside engines are not modelled" in error


def test_a_system_that_does_not_draft_is_bounded_without_drafts():
    setup = Setup.of(load_scenario("moonlight").scaled(0.04), 0)
    plain, drafting = (setup.run(name, system(name), 0).bounds["best_s"] for name in ("seer", "seer_drafts"))
    assert plain > drafting


def test_a_claim_has_one_number_where_its_ends_agree_and_the_found_ratio_after_it():
    result = {"baseline": "verl", "throughput_ratio": {"verl": [1.0, 1.0, 1.0], "das": [1.8, 1.7, 1.9], "seer": None}}
    assert claim_line("throughput_ratio", [2.0, 2.0], result) == "claimed: throughput ratio 2; here: das 1.80"
    assert claim_line("class_accuracy", [0.5, 0.75], result) == "claimed: class accuracy 0.5 to 0.75"
