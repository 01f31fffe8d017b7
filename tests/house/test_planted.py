"""The defects planted by hand can be planted: `make test-planted` shows that each is found."""

import ast
from functools import cache

import pytest
from planted.defect import ROOT, Defect, defects

DEFECTS = defects()


def test_there_are_defects_of_many_rooms_and_each_has_a_name_of_its_own():
    assert len(DEFECTS) >= 60
    assert len({one.name for one in DEFECTS}) == len(DEFECTS)
    assert len({one.room for one in DEFECTS}) >= 10


@cache
def dumped(file: str) -> str:
    return ast.dump(ast.parse((ROOT / file).read_text()))


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_it_is_code_that_differs_and_its_checks_are_there(defect):
    planted = defect.planted((ROOT / defect.file).read_text())
    assert ast.dump(ast.parse(planted)) != dumped(defect.file)
    assert all((ROOT / check.partition("::")[0]).is_file() for check in defect.found_by)


def test_an_entry_whose_text_has_changed_is_named():
    with pytest.raises(ValueError, match=r"'gone': its old text is 0 times in a\.py; renew the entry"):
        Defect(name="gone", file="a.py", old="x", new="y", found_by=("tests/test_a.py",)).planted("z")
