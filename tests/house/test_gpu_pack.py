"""The pack for a machine with a GPU: pruning of a fat binary, names and sizes. No package index, no compiler."""

import json
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER, PADDING = 64, 24


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def entry(kind: int, chip: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, HEADER, len(code)).ljust(28, b"\0") + struct.pack("<I", chip)
    return head.ljust(HEADER, b"\0") + code


def container(*entries: bytes) -> bytes:
    whole = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(whole)) + whole


PTX, CUBIN = 1, 2
WANTED = entry(CUBIN, 90, b"hopper" * 4), entry(CUBIN, 90, b"again!!!" * 2)
CONTAINERS = (
    container(entry(CUBIN, 80, b"ampere! " * 9), WANTED[0], entry(PTX, 90, b"text of 90..... "), WANTED[1]),
    container(entry(CUBIN, 100, b"blackwell." * 8)),
    container(WANTED[1]),
)


def fat() -> bytes:
    """Three containers, with padding before, between and behind them."""
    return b"".join(bytes(PADDING) + each for each in CONTAINERS) + bytes(PADDING)


def test_one_chips_code_is_left_and_all_keeps_its_place():
    from gpu_pack.fat_binary import Pruned, Span, containers_of, entries_of, prune_span

    before, data = fat(), bytearray(b"in front" + fat() + b"behind")
    found = prune_span(data, Span(8, 8 + len(before)), 90)
    sizes = [len(each) - 16 for each in CONTAINERS]
    kept = [sum(map(len, WANTED)), 0, len(WANTED[1])]
    assert found == Pruned(3, 1, sum(kept), sum(sizes) - sum(kept))
    assert len(data) == len(before) + 14 and data.startswith(b"in front") and data.endswith(b"behind")
    places = [at for at, _ in containers_of(data, Span(8, 8 + len(before)))]
    assert places == [at for at, _ in containers_of(b"in front" + before, Span(8, 8 + len(before)))]
    whole = [span for _, span in containers_of(data, Span(8, 8 + len(before)))]
    assert [span.end - span.start for span in whole] == kept
    left = [bytes(data[one.start : one.end]) for span in whole for one, _, _ in entries_of(data, span)]
    assert left == [*WANTED, WANTED[1]]
    rest = bytes(data[8:-6])
    for each in (*left, b"in front"):
        rest = rest.replace(each, b"")
    assert set(rest.replace(struct.pack("<I", 0xBA55ED50), b"")) <= {0, 1, 16, *struct.pack("<QQ", kept[0], kept[2])}


def library(section: bytes, name: bytes = b".nv_fatbin") -> bytes:
    """A 64-bit ELF file of two sections: this one, and the names of both."""
    names = b"\0" + name + b"\0.shstrtab\0"
    at = 64 + len(section)
    table = at + len(names)
    head = (b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack("<Q", table)).ljust(0x3A, b"\0")
    head += struct.pack("<HHH", 64, 2, 1)
    sections = ((1, 64, len(section)), (len(name) + 2, at, len(names)))
    headers = [struct.pack("<IIQQQQ", text, 1, 0, 0, start, size).ljust(64, b"\0") for text, start, size in sections]
    return head + section + names + b"".join(headers)


def test_a_library_is_pruned_in_place(tmp_path):
    from gpu_pack.fat_binary import prune

    path = tmp_path / "one.so"
    path.write_bytes(library(fat()))
    assert prune(path, 90)[:2] == (3, 1)
    assert len(path.read_bytes()) == len(library(fat())) and b"ampere" not in path.read_bytes()
    assert WANTED[0] in path.read_bytes()
    again = path.read_bytes()
    assert prune(path, 90).dropped == 0 and path.read_bytes() == again


@pytest.mark.parametrize(
    ("content", "said"), [(library(b"code", b".text"), "no section .nv_fatbin"), (b"MZ", "not a 64-bit ELF file")]
)
def test_a_file_without_code_for_gpus_is_refused(tmp_path, content, said):
    from gpu_pack.fat_binary import prune

    (tmp_path / "x.so").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        prune(tmp_path / "x.so", 90)


def test_all_that_is_carried_is_in_the_lock():
    from gpu_pack.carried import LOCK, PACKAGES, POOL, VLLM, version_of

    lock = LOCK.read_text()
    assert all(version_of(name, lock) for name in (*PACKAGES, POOL, VLLM))
    assert len(set(PACKAGES)) == len(PACKAGES)
    with pytest.raises(ValueError, match=r"requirements/gpu.txt: no pin of pydant; .*make lock"):
        version_of("pydant", lock)


def test_a_pack_that_is_too_large_names_its_largest_archives(tmp_path):
    from gpu_pack.archives import Archive, TooLarge, check_size, table

    archives = [Archive("small", 1 << 20, 2 << 20), Archive("large", 50 << 20, 1), Archive("middle", 5 << 20, 1)]
    assert check_size(archives) == 56 << 20
    with pytest.raises(TooLarge, match=r"has 56.0 MiB, 55 are allowed; largest: large 50.0, middle 5.0, small 1.0 MiB"):
        check_size(archives, 55 << 20)
    assert table(archives).splitlines()[-1].split() == ["all", "56.0", "2.0"]


def test_files_are_packed_by_their_archives_and_replace_older_ones(tmp_path):
    from gpu_pack.archives import foreign_files, pack

    site, out = tmp_path / "site", tmp_path / "out"
    names = ["vllm/_C_stable_libtorch.abi3.so", "vllm/a.py", "vllm-0.32.dist-info/METADATA", "pydantic/b.py",
             "mooncake/c.py", "system/libd.so", "pydantic/__pycache__/b.pyc"]  # fmt: skip
    for name in names:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(name)
    out.mkdir()
    (out / "old.tar.xz").write_text("an older pack's")
    assert foreign_files(out) == []
    found = {one.name: one for one in pack(tmp_path, out)}
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{name}.tar.xz" for name in found)
    inside = {}
    for name in found:
        with tarfile.open(out / f"{name}.tar.xz") as tar:
            inside[name] = sorted(tar.getnames())
            assert {(each.uid, each.mtime, each.uname) for each in tar.getmembers()} == {(0, 0, "")}
    assert inside == {
        "operators": ["site/vllm/_C_stable_libtorch.abi3.so"],
        "vllm": ["site/vllm-0.32.dist-info/METADATA", "site/vllm/a.py"],
        "packages": ["site/pydantic/b.py"],
        "pool": ["site/mooncake/c.py", "site/system/libd.so"],
    }
    assert found["pool"].plain == len("mooncake/c.py") + len("system/libd.so")


def test_a_folder_with_files_of_others_is_left(tmp_path, capsys):
    from gpu_pack.__main__ import main

    (tmp_path / "notes").write_text("mine")
    assert main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"gpu-pack: --out {tmp_path}: notes there is of no pack; name another folder"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_parts_of_wheels_are_left_out(tmp_path):
    from gpu_pack.layout import lay_out

    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as file:
        for name in ("vllm/a.py", "vllm/vllm-rs", "vllm/third_party/deep_gemm/x.h", "vllm/_vllm_fa2_C.abi3.so"):
            file.writestr(name, "")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as file:
        for name in ("other/a.py", "other/a.pyi", "other/include/b.h"):
            file.writestr(name, "")
    site = tmp_path / "site"
    lay_out(site, {"vllm": tmp_path / "vllm.whl", "other": tmp_path / "other.whl"}, print)
    assert sorted(path.name for path in site.rglob("*") if path.is_file()) == ["a.py", "a.py"]


def test_wheels_that_are_there_are_not_fetched_again(tmp_path):
    from gpu_pack.wheels import NotFetched, fetch

    (tmp_path / "pydantic_core-2.50.4-cp312-cp312-manylinux.whl").write_text("")
    lock = "pydantic-core==2.50.4 --hash=sha256:1\n"
    assert list(fetch(tmp_path, ["pydantic-core"], lock)) == ["pydantic-core"]
    with pytest.raises((NotFetched, ValueError), match="no pin of msgspec"):
        fetch(tmp_path, ["pydantic-core", "msgspec"], lock)


@pytest.mark.parametrize(("packed", "code"), [(1 << 20, 0), (57 << 20, 1)])
def test_the_sizes_are_one_json_object(monkeypatch, capsys, tmp_path, packed, code):
    from gpu_pack import __main__, archives

    def build(_asked, tell):
        tell("packing")
        return [archives.Archive("vllm", packed, 2 << 20)]

    monkeypatch.setattr(__main__, "build", build)
    monkeypatch.setattr(__main__.pool_files, "missing_tool", lambda: None)
    assert __main__.main(["--json", "--out", str(tmp_path)]) == code
    out, err = capsys.readouterr()
    assert "packing" in err
    if code:
        assert out == "" and "the pack has 57.0 MiB, 56 are allowed; largest: vllm 57.0 MiB" in err
    else:
        found = json.loads(out)
        assert (found["bytes"], found["limit_bytes"]) == (1 << 20, 56 << 20)
        assert found["archives"] == {"vllm": {"packed_bytes": 1 << 20, "plain_bytes": 2 << 20}}


def test_a_tool_that_is_missing_is_named_before_anything_is_fetched(monkeypatch, capsys, tmp_path):
    from gpu_pack import __main__

    monkeypatch.setenv("PATH", str(tmp_path))
    assert __main__.main(["--out", str(tmp_path / "pack")]) == 2
    assert capsys.readouterr().err.endswith("install it, or leave out the pool (--without-pool)\n")
    assert list(tmp_path.iterdir()) == []
