"""The mutation test of our own: its rules, planting in a loaded function, and a campaign on a small project."""

import ast
import json
import subprocess
import sys
import textwrap
from functools import lru_cache

import pytest
from mutants.mutant import ROOT, Finder, Mutant, mutants
from mutants.operators import changes
from mutants.outcomes import MutantOutcome, explained, table
from mutants.planting import codes, compiles
from mutants.reach import TestRun, checks
from mutants.rooms import ROOMS, drawn


def changed(text: str) -> set[tuple[str, str]]:
    """All changes of one statement or expression: rule and new text."""
    return {
        (rule, ast.unparse(new) if new is not None else "pass")
        for node in ast.walk(ast.parse(text).body[0])
        for rule, new in changes(node)
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a < b", {("compare", "a <= b")}),
        ("x = a not in b", {("compare", "a in b")}),
        ("x = a + b", {("compute", "a - b")}),
        ("x = 'a' + b", set()),
        ("x = a and not b", {("and-or", "a or not b"), ("drop not", "b")}),
        ("x = a if b else c", {("negate", "a if not b else c")}),
        ("x = 3", {("add one", "4")}),
        ("x = True", {("flip", "False")}),
        ("x = min(a, b)", {("min-max", "max(a, b)")}),
        ("x = sorted(a)", {("keep order", "list(a)")}),
        ("x = f(a, b, k=c)", {("swap arguments", "f(b, a, k=c)"), ("drop argument", "f(a, b)")}),
        ("x = a[b:c]", {("open slice", ":c"), ("open slice", "b:")}),
        ("self.a = b", {("delete", "pass")}),
        ("a.add(b)", {("delete", "pass")}),
        ("log.info(a)", set()),
        ("raise a", {("delete", "pass")}),
    ],
)
def test_a_rule_changes_one_thing(text, expected):
    assert changed(text) == expected


def test_a_change_is_made_in_the_function_that_it_names_and_only_there():
    text = textwrap.dedent('''
        LIMIT = 3

        class Box:
            """Holds."""
            size = 4

            def more(self, by=1):
                """Grows."""
                def inner():
                    return by + 5
                return inner()
    ''')
    finder = Finder("box.py", text)
    finder.visit(ast.parse(text))
    assert {(one.function, one.rule, one.old, one.new) for one in finder.mutants} == {
        ("Box.more.inner", "return none", "return by + 5", "return None"),
        ("Box.more.inner", "compute", "by + 5", "by - 5"),
        ("Box.more.inner", "add one", "5", "6"),
        ("Box.more", "return none", "return inner()", "return None"),
    }
    number = next(one.place for one in finder.mutants if one.rule == "compute")
    made = ast.unparse(Finder("box.py", text, number).visit(ast.parse(text)))
    never = "\n            if False:\n                (by,)"
    assert made == ast.unparse(ast.parse(text.replace("by + 5", f"by - 5{never}")))


@pytest.mark.parametrize("room", ["channel", "rewards"])
def test_a_room_s_mutants_have_keys_of_their_own_and_are_drawn_alike_each_time(room):
    first = drawn(room, 5)
    assert len(first) == len({one.key for one in first}) == 5
    assert first == drawn(room, 5)
    assert all(compiles(one) for one in first)


def test_each_room_has_files():
    assert all(list(ROOT.glob(form)) for forms in ROOMS.values() for form in forms)


def test_inner_code_objects_are_found():
    assert [one.co_name for one in codes(compile("def f():\n def g(): pass", "f.py", "exec"))] == ["<module>", "f", "g"]


PRODUCT = """
    import functools

    def decorated(function):
        @functools.wraps(function)
        def call(*values):
            return function(*values)
        return call

    @decorated
    def share(part, whole):
        if whole < 1:
            return 0
        return part / whole

    def untested(x):
        return x + 1
"""

TESTS = """
    from product import share

    def test_share():
        assert share(3, 2) == 1.5
"""


def test_a_campaign_on_a_small_project(tmp_path):
    """A mutant in a decorated function is planted and found; one that a test does not look at survives."""
    (tmp_path / "product.py").write_text(textwrap.dedent(PRODUCT))
    (tmp_path / "test_product.py").write_text(textwrap.dedent(TESTS))
    program = f"""
        import json, pathlib, sys, pytest
        import mutants.mutant, mutants.planting, mutants.reach
        root = pathlib.Path({str(tmp_path)!r})
        for module in (mutants.mutant, mutants.planting, mutants.reach):
            module.ROOT = root
        from mutants.loop import MutantLoop
        wanted = mutants.mutant.mutants("product.py")
        states = {{}}
        def note(mutant, state, by, seconds):
            states[mutant.key] = [state, by]
        reach = mutants.reach.ReachFile(root / "reach.json")
        code = pytest.main(["-q", "-s", "-p", "no:cacheprovider", "--rootdir", str(root), str(root)],
                           plugins=[MutantLoop(wanted, reach, 2, 10.0, note)])
        (root / "states.json").write_text(json.dumps(states))
        sys.exit(int(code))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path, env={"PYTHONPATH": f"{ROOT / 'tests'}:{tmp_path}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    states = json.loads((tmp_path / "states.json").read_text())
    finder = ["found", "test_product.py::test_share"]
    assert states == {
        "product.py decorated return none: return call -> return None": ["unreached", ""],
        "product.py decorated.call return none: return function(*values) -> return None": finder,
        "product.py share compare: whole < 1 -> whole <= 1": ["survived", "1 tests"],
        "product.py share add one: 1 -> 2": ["survived", "1 tests"],
        "product.py share return none: return 0 -> return None": ["survived", "1 tests"],
        "product.py share add one: 0 -> 1": ["survived", "1 tests"],
        "product.py share return none: return part / whole -> return None": finder,
        "product.py share compute: part / whole -> part * whole": finder,
        "product.py untested return none: return x + 1 -> return None": ["unreached", ""],
        "product.py untested compute: x + 1 -> x - 1": ["unreached", ""],
        "product.py untested add one: 1 -> 2": ["unreached", ""],
    }


def test_checks_are_the_quickest_ones_of_the_budget_by_module():
    entered = frozenset({"a.py f"})
    runs = [
        TestRun("slow::a", "slow", 5.0, entered),
        TestRun("quick::a", "quick", 1.0, entered),
        TestRun("quick::b", "quick", 2.0, frozenset()),
        TestRun("slow::b", "slow", 1.0, entered),
    ]
    assert [one.test for one in checks(runs, "a.py f", 10.0)] == ["quick::a", "slow::b", "slow::a"]
    assert [one.test for one in checks(runs, "a.py f", 2.0)] == ["quick::a", "slow::b"]
    assert checks(runs, "a.py g", 10.0) == []


def test_the_table_takes_out_explained_ones_and_those_that_never_ran(monkeypatch):
    monkeypatch.setattr("mutants.outcomes.explained", lambda: {"b": "equal"})
    states = {"a": "found", "b": "survived", "c": "survived", "d": "unplanted", "e": "unreached", "f": "unsure"}
    outcomes = [MutantOutcome(key, "core", "pure", state, "", 1.0) for key, state in states.items()]
    assert table(["core"], outcomes) == [
        {"room": "core", "mutants": 6, "found": 1, "survived": 1, "unreached": 1, "unplanted": 1, "unsure": 1,
         "explained": 1, "share": 0.333}
    ]  # fmt: skip


@lru_cache
def keys_of(file: str) -> set[str]:
    return {one.key for one in mutants(file)}


@pytest.mark.parametrize(("key", "why"), explained().items(), ids=lambda text: text[:60])
def test_each_explained_mutant_is_still_one(key, why):
    assert key in keys_of(key.partition(" ")[0]), "its line has changed: renew the entry or take it out"
    assert len(why) > 20


def test_a_mutant_has_a_rank_of_its_own():
    one = Mutant("a.py", "f", "compare", 1, 0, "a < b", "a <= b")
    assert one.rank == one._replace(line=9, place=3).rank != one._replace(new="a > b").rank
