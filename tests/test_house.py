"""House rules that a reader can check with the eye, checked without it."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache

import pytest
from test_imports import CHAIN, EVERY, ROOT, names_of, nodes_of, offences, sources, tree_of

MAX_LINES = 300
ONE_NOUN = {
    "policies/core/rollout.py": "`RolloutCore`, the state machine",
    "deployments/coordinator/rollouts.py": "`Rollouts`, the loops of the live shell",
    "deployments/drafting/drafts.py": "`EngineDrafts`, the drafts of one engine",
    "deployments/engine/stepper.py": "`Stepper`, one vLLM engine and its chunks",
    "lab/simulator/host.py": "the simulated shell",
    "lab/simulator/hardware.py": "published figures of GPUs and models, a table",
}
"""Files that may be longer, since splitting their one noun would read worse."""

MAX_DOCSTRING_LINES = 12
MAX_POSITIONAL = 5
"""Positional arguments of a constructor: two of six could change places unseen."""

IDIOMS = {
    "goes on": r"\b(goes|go|going|went) on\b",
    "behind, beside": r"\b(behind|beside)\b",
    "of itself, anew": r"\b(of itself|of themselves|anew)\b",
    "so many": r"\bso (many|much)\b",
    "least, most": r"(?<!at )\b(least|most)\b(?! (recent|likely|of the))",
    "stands, lies": r"\b(stands?|lies)\b",
    "None: ...": r"[;,.] None:",
    "who, nobody": r"\b(who|whom|whoever|nobody|everybody)\b",
    "what ...": r"\bwhat\b",
    "told": r"\b(told|tells?|telling)\b",
}
"""Phrases that make a reader stop, with the pattern that counts them in comments, docstrings and messages."""

MAX_IDIOMS = {
    "goes on": 2,
    "behind, beside": 6,
    "of itself, anew": 0,
    "so many": 1,
    "least, most": 25,
    "stands, lies": 4,
    "None: ...": 1,
    "who, nobody": 4,
    "what ...": 29,
    "told": 4,
}
"""How often each may occur in the product. Lower a number when the count has fallen; never raise one."""

DOCSTRING = re.compile(r'(#[^\n]*\n)*"""(?P<text>.+?)"""', re.DOTALL)
REASON = re.compile(r"#\s*(noqa: BLE001\s*-*\s*)?(?P<reason>\S.*)?$")
CONFIGURATION = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((*ROOT.glob("*.yaml"), *ROOT.glob("*.yml"), *ROOT.glob("Makefile"), *ROOT.glob("scripts/*")))
    if path.is_file()
]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def broad_catches(source: str, tree: ast.Module) -> list[int]:
    """Lines that catch everything without saying why behind it. A bare `except:` is never excused."""
    lines, found = source.splitlines(), []
    for node in nodes_of(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and "suppress" in (
            getattr(node.func, "id", ""),
            getattr(node.func, "attr", ""),
        ):
            caught = node.args
        else:
            continue
        broad = any(isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException") for kind in caught)
        comment = REASON.search(lines[node.lineno - 1])
        if None in caught or (broad and not (comment and len(comment["reason"] or "") >= 10)):
            found.append(node.lineno)
    return found


def test_no_file_is_called_utils():
    """Files are split by noun."""
    assert not [path for path in sources(*CHAIN, "tests") if path.stem in ("utils", "util", "helpers", "common")]


def wordy(name: str) -> bool:
    docstring = DOCSTRING.match(text_of(name))
    return not docstring or docstring["text"].strip().count("\n") >= MAX_DOCSTRING_LINES


def test_every_module_says_what_it_is_in_few_lines():
    assert offences([*EVERY, *names_of(sources("tests", "scripts"))], wordy) == {}


def test_files_are_short_unless_they_are_one_noun():
    assert set(offences(EVERY, lambda name: text_of(name).count("\n") > MAX_LINES)) <= set(ONE_NOUN)


def classes_of(tree: ast.Module) -> list[str]:
    return [node.name for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]


def test_no_class_name_stands_for_two_things():
    places = defaultdict(list)
    for name in EVERY:
        for each in classes_of(tree_of(name)):
            places[each].append(name)
    assert {each: files for each, files in places.items() if len(files) > 1} == {}


@cache
def known_classes() -> frozenset[str]:
    return frozenset(each for name in EVERY for each in classes_of(tree_of(name)))


def crowded_calls(tree: ast.Module) -> list[str]:
    """Constructors of ours that are given more than MAX_POSITIONAL values without their names."""
    calls = (node for node in nodes_of(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    crowded = (call for call in calls if call.func.id in known_classes() and len(call.args) > MAX_POSITIONAL)
    return [f"{call.func.id}, line {call.lineno}" for call in crowded]


def test_constructors_with_many_fields_are_called_by_keyword():
    assert offences(EVERY, lambda name: crowded_calls(tree_of(name))) == {}


def prose_of(name: str) -> str:
    """All comments and strings with a space in them: docstrings, help texts, descriptions, messages."""
    tokens = tokenize.generate_tokens(io.StringIO(text_of(name)).readline)
    kinds = (tokenize.COMMENT, tokenize.STRING)
    return "\n".join(token.string for token in tokens if token.type in kinds and " " in token.string)


def idioms_of(text: str) -> Counter:
    return Counter({idiom: len(re.findall(pattern, text, re.IGNORECASE)) for idiom, pattern in IDIOMS.items()})


def test_bad_idioms_may_only_become_fewer():
    found = sum((idioms_of(prose_of(name)) for name in EVERY), Counter())
    assert {idiom: count for idiom, count in found.items() if count > MAX_IDIOMS.get(idiom, 0)} == {}


def test_an_idiom_is_counted():
    text = "The sample goes on. Nobody is told what lies behind; None: the least, so many."
    assert idioms_of(text) == Counter(dict.fromkeys(IDIOMS, 1)) - Counter({"of itself, anew": 1})


def test_nothing_listens_on_every_interface():
    """A rollout service runs code for whoever reaches it; the address to listen on is named, and local by default."""
    assert offences([*EVERY, *CONFIGURATION], lambda name: "0.0.0.0" in text_of(name)) == {}


def test_whoever_catches_everything_says_why():
    assert offences(EVERY, lambda name: broad_catches(text_of(name), tree_of(name))) == {}


@pytest.mark.parametrize(
    ("handler", "lines"),
    [
        ("except:  # because I can do it", [3]),
        ("except Exception:", [3]),
        ("except Exception as error:  # noqa: BLE001", [3]),
        ("except (ValueError, BaseException):", [3]),
        ("except Exception as error:  # noqa: BLE001 - the edge of the thread", []),
        ("except Exception:  # the edge of the process", []),
        ("except ValueError:", []),
    ],
)
def test_a_broad_catch_is_found(handler, lines):
    for source, found in (
        (f"try:\n    pass\n{handler}\n    pass\n", lines),
        ("with contextlib.suppress(Exception):\n    pass\n", [1]),
    ):
        assert broad_catches(source, ast.parse(source)) == found
