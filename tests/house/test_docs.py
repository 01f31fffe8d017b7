"""The documentation: links resolve, commands parse, generated pages are current, the example policy works."""

import re
import shlex
import sys
from pathlib import Path

import click
import pytest
from test_rollout_cases import finish, join, submit, tick

from tailrace.app.cli import main
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.sample_states import TABLE, State
from tailrace.policies.families.allowed_code import allow_code
from tailrace.policies.families.ordering import Ordering
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EndSample, StartChunk
from tailrace.policies.protocol.file_keys import keys_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHEAP = [
    ["simulate", "--scale", "0.05"],
    ["policies"],
    ["schema"],
    ["timeline", str(ROOT / "tests/data/journal.jsonl.gz")],
    [
        "simulate",
        "--scale",
        "0.05",
        "--compare",
        "verl,config",
        "--config",
        str(ROOT / "examples/my_policy/serve.yaml"),
    ],
]
LIVE = "starts Ray and vLLM; tests/live covers it"
NOT_RUN = [
    ("rollout", LIVE),
    ("serve", LIVE),
    ("verify", LIVE),
    ("soak", LIVE),
    ("profile", LIVE),
    ("pool", LIVE),
    ("drafts", LIVE),
]


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "my_policy"))
    yield
    sys.modules.pop("my_policy", None)


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def command_lines() -> list[str]:
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(re.findall(r"^```[a-z]*\n(.*?)^```", text, flags=re.S | re.M))
        lines = [line for line in blocks.splitlines() if re.match(r"(\w+=\S+ )?tailrace ", line)]
        found += [re.sub(r"^\w+=\S+ ", "", line) for line in lines]
        found += re.findall(r"`(tailrace [^`\n]+)`", text)
    return sorted(set(found))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_named_tests_exist():
    """Pages give the test that holds a claim by its path, in backticks; `*` stands for any letters."""
    named = {(page.name, path) for page in PAGES for path in re.findall(r"\btests/[\w/*.]+", page.read_text())}
    assert len(named) > 20
    assert not [(page, path) for page, path in named if not any(ROOT.glob(path.rstrip("./")))]


@pytest.mark.parametrize("line", command_lines())
def test_a_documented_command_and_its_options_exist(line):
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "..."]
    command = main
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        name = words.pop(0).rstrip(",.;")
        names = [part for part in name.split("|") if part.isupper() is False]
        found = [command.get_command(click.Context(command), part) for part in names]
        if not names:
            break
        assert all(found), f"{line}: no command {name}"
        command = found[0]
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    given = {word.partition("=")[0].rstrip(",.;") for word in words if word.startswith("--")}
    assert given <= options | {"--help", "--version"}, line


def commands_of(group: click.Group) -> list[click.Command]:
    members = [group.get_command(click.Context(group), name) for name in group.list_commands(click.Context(group))]
    return [one for m in members for one in (commands_of(m) if isinstance(m, click.Group) else [m])]


def test_files_that_commands_take_reach_them_as_paths():
    texts = [
        f"{command.name} {param.opts[0]}"
        for command in commands_of(main)
        for param in command.params
        if isinstance(param.type, click.Path) and param.type.type is not Path
    ]
    assert not texts, "give it path_type=Path"


@pytest.mark.parametrize("arguments", CHEAP, ids=lambda arguments: " ".join(arguments[:3])[-30:])
def test_cheap_commands_run(arguments, examples):
    assert not main(arguments, standalone_mode=False)


@pytest.mark.parametrize(("name", "reason"), NOT_RUN)
def test_what_is_not_run_exists(name, reason):
    assert main.get_command(click.Context(main), name) and reason


@pytest.mark.parametrize("name", ["configuration_reference", "command_reference"])
def test_generated_pages_are_up_to_date(name, scripts):
    made = __import__(name)
    assert made.PAGE.read_text() == made.page(), f"run scripts/{name}.py"


def test_the_configuration_has_few_keys_and_each_has_a_meaning(scripts):
    import configuration_reference

    sections = configuration_reference.keys()
    rows = {(title, key): row for title, of in sections.items() for key, row in of.items()}
    assert len(rows) <= 62 and len(configuration_reference.knobs()) <= 5
    assert not [key for key, (_, _, about) in rows.items() if not about.strip()]
    modelled = {f"{prefix}{name}" for _, prefix, model in configuration_reference.SECTIONS for name in keys_of(model)}
    shown = {key for _, key in rows}
    assert not [key for key in modelled if not any(f"{one}.".startswith(f"{key}.") for one in shown)]


def test_the_state_table_is_the_cores_and_the_diagram_is_the_tables(scripts):
    import core_states

    page = core_states.PAGE.read_text()
    assert core_states.rendered(page) == page, "run scripts/core_states.py"
    assert {state for row in TABLE for state in (row.state, row.then) if state} == set(State)
    assert all(hasattr(ev, row.event) for row in TABLE)
    drawn = set(re.findall(r"^    (\w+|\[\*\]) --> (\w+):", core_states.diagram(), flags=re.M))
    changes = [row for row in TABLE if row.state is not row.then]
    assert drawn == {(row.state.value if row.state else "[*]", row.then.value) for row in changes}


def test_a_policy_of_ones_own_runs_every_sample_to_its_end_shortest_first(examples):
    allow_code("my_policy")
    ordering = {"type": "my_policy:ShortestFirst", "args": {"head_start": 8}}
    policies = Policies(ordering=ordering, chunking={"type": "fixed", "chunk_tokens": 30})
    assert isinstance(policies.ordering, Ordering)
    assert Policies(**policies.model_dump()) == policies
    core = RolloutCore(policies)
    core.observe(join("r", 200, max_running=1))
    submit(core, ev.GroupSpec("long", 10, 2, 90), ev.GroupSpec("short", 10, 2, 30))
    started, ended = [], []
    while actions := tick(core):
        ended += [action.sample_id for action in actions if isinstance(action, EndSample)]
        for start in (action for action in actions if isinstance(action, StartChunk)):
            started.append(start.sample_id)
            finish(core, start)
    assert started[:2] == ["short#0", "short#1"]
    assert sorted(ended) == ["long#0", "long#1", "short#0", "short#1"]
