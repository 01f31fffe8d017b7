"""The pool's configuration is strict, and an SSD folder that cannot be used is a line of text, not an error."""

import pytest
from pydantic import ValidationError

from tailrace.kvpool.pool_config import PoolConfig
from tailrace.kvpool.store_node import ssd_folder


@pytest.mark.parametrize(
    "values, said",
    [
        ({"dram_gb": 1}, "dram_gb"),
        ({"protocol": "udp"}, "protocol"),
        ({"dram_gib": 0}, "dram_gib"),
        ({"ssd_path": "relative/folder"}, "absolute"),
        ({"ssd_path": "/tmp/../etc"}, "absolute"),
        ({"lookup_deadline_s": 0}, "lookup_deadline_s"),
    ],
)
def test_what_is_wrong_is_named(values, said):
    with pytest.raises(ValidationError, match=said):
        PoolConfig(**values)


def test_a_new_folder_is_the_owners_alone(tmp_path):
    config = PoolConfig(ssd_path=str(tmp_path / "deep" / "kv"), ssd_gib=0.001)
    (one, on), (two, _) = ssd_folder(config), ssd_folder(config)
    assert on == "on" and one != two and one.parent == tmp_path / "deep" / "kv"
    assert [path.stat().st_mode & 0o777 for path in (one.parent, one, two)] == [0o700] * 3


def test_no_path_is_off():
    assert ssd_folder(PoolConfig()) == (None, "off")


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path, gib, said in [(file, 1, "File exists"), (file / "kv", 1, "Not a directory"), (tmp_path, 1e9, "GiB free")]:
        folder, why = ssd_folder(PoolConfig(ssd_path=str(path), ssd_gib=gib))
        assert folder is None and why.startswith(f"{path}: ") and said in why and "\n" not in why
