"""Which folders of weights a running engine refuses, and in what words; and how another set of weights is made."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tailrace.app.errors import BadInput
from tailrace.app.model import perturbed
from tailrace.deployments.vllm_exact import weight_loading
from tailrace.deployments.vllm_exact.weight_loading import (
    checked_digest,
    predicts_further,
    refusal,
    tensors_of,
    weights_digest,
)

LAYERS = 2
EMBEDDING = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
TENSORS = {
    "embed": EMBEDDING,
    "head": EMBEDDING.copy(),  # tied, and stored twice
    "layer.0.weight": np.ones((4, 4), np.float32),
    "layer.1.weight": np.full((4, 4), 2, np.float32),
    "positions": np.arange(4, dtype=np.int64),
}


def write(folder: Path, tensors=TENSORS, name="model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    for other in ("config.json", "tokenizer.json"):
        (folder / other).write_text("{}")
    return folder


def split(folder: Path) -> Path:
    """The same tensors in two files with an index, beside a third file that the index does not name."""
    first, second = {"embed": TENSORS["embed"]}, {name: TENSORS[name] for name in TENSORS if name != "embed"}
    write(folder, first, "a.safetensors")
    write(folder, second, "b.safetensors")
    write(folder, {"embed": np.zeros(1, np.float32)}, "consolidated.safetensors")
    files = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture
def loaded(tmp_path):
    return tensors_of(str(write(tmp_path / "loaded")))


def test_the_same_tensors_are_taken_however_they_are_split_or_rounded(tmp_path, loaded):
    rounded = {
        name: value.astype(np.float16) if value.dtype == np.float32 else value for name, value in TENSORS.items()
    }
    for folder in (write(tmp_path / "same"), split(tmp_path / "split"), write(tmp_path / "half", rounded)):
        assert refusal(str(folder), loaded, LAYERS) is None


FURTHER = ("mtp.fc.weight", "model.mtp_layers.0.norm", "model.layers.2.norm", "model.language_model.layers.2.norm")


@pytest.mark.parametrize("name", FURTHER)
def test_layers_that_predict_further_may_be_missing(tmp_path, name):
    """Trainers may not have them: transformers leaves them out of its models."""
    loaded = tensors_of(str(write(tmp_path / "with", {**TENSORS, name: EMBEDDING})))
    plain, other = str(write(tmp_path / "plain")), {**TENSORS, name: EMBEDDING[1:]}
    assert refusal(plain, loaded, LAYERS) is None
    assert f"the running model has no tensor {name}" in refusal(str(tmp_path / "with"), tensors_of(plain), LAYERS)
    assert name in refusal(str(write(tmp_path / "other", other)), loaded, LAYERS)
    held = ("model.layers.1.norm", "model.visual.layers.2.norm", "layer.2")
    assert not [mine for mine in held if predicts_further(mine, LAYERS)]
    fewer = {key: value for key, value in TENSORS.items() if key != "layer.1.weight"}
    assert "no tensor layer.1.weight" in refusal(str(write(tmp_path / "fewer", fewer)), loaded, LAYERS)


def without_files(folder: Path):
    (write(folder) / "model.safetensors").unlink()


def pickled(folder: Path):
    without_files(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def cut_off(folder: Path):
    path = write(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def twice(folder: Path):
    write(write(folder), {"embed": EMBEDDING}, "more.safetensors")


def unlisted(folder: Path):
    (split(folder) / "model.safetensors.index.json").write_text("[]")


def one_file_absent(folder: Path):
    (split(folder) / "b.safetensors").unlink()


def changed(**tensors):
    return lambda folder: write(folder, TENSORS | tensors)


REFUSED = {
    "nowhere": (lambda folder: None, "no such folder"),
    "without files": (without_files, r"no \*\.safetensors"),
    "pickled": (pickled, r"no \*\.safetensors"),
    "cut off": (cut_off, "model.safetensors cannot be read"),
    "twice": (twice, "more.safetensors has embed, which another file has too"),
    "bad index": (unlisted, "model.safetensors.index.json cannot be read"),
    "file absent": (one_file_absent, "b.safetensors cannot be read"),
    "fewer": (lambda folder: write(folder, {"embed": EMBEDDING}), "no tensor head, which the running model has"),
    "more": (changed(extra=EMBEDDING), "the running model has no tensor extra"),
    "shape": (changed(embed=EMBEDDING.T.copy()), r"embed is float \(4, 6\), in the running model float \(6, 4\)"),
    "type": (changed(embed=EMBEDDING.astype(np.int8)), r"embed is I8 \(6, 4\), in the running model float"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(tmp_path, loaded, case):
    spoil, words = REFUSED[case]
    other = tmp_path / "other"
    spoil(other)
    reason = refusal(str(other), loaded, LAYERS)
    assert re.search(words, reason) and str(other) in reason and "\n" not in reason


# ---- another set of weights ------------------------------------------------------------------------


def test_perturbed_weights_are_near_repeatable_and_tied_as_before(tmp_path):
    source = write(tmp_path / "source")
    out = perturbed(source, tmp_path / "out", seed=3, scale=0.05)
    again = perturbed(source, tmp_path / "again", seed=3, scale=0.05)
    got, expected = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    for name in ("embed", "layer.0.weight", "layer.1.weight"):
        assert got[name].dtype == np.float32 and (got[name] != TENSORS[name]).all()
        np.testing.assert_allclose(got[name], TENSORS[name], rtol=0.25)  # five standard deviations
    assert (got["embed"] == got["head"]).all()
    assert (got["layer.0.weight"] * 2 != got["layer.1.weight"]).any(), "each tensor has noise of its own"
    assert (got["positions"] == TENSORS["positions"]).all()
    assert all((got[name] == expected[name]).all() for name in TENSORS)
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    assert refusal(str(out), tensors_of(str(source)), LAYERS) is None


def test_files_stay_split_and_copies_of_other_formats_are_left_out(tmp_path):
    source = split(tmp_path / "source")
    (source / "pytorch_model.bin").touch()
    out = perturbed(source, tmp_path / "out")
    assert {path.name for path in source.iterdir()} - {path.name for path in out.iterdir()} == {"pytorch_model.bin"}
    assert (load_file(out / "a.safetensors")["embed"] == load_file(out / "b.safetensors")["head"]).all()


def test_a_perturbed_folder_is_kept_and_remade_when_cut_off_or_of_another_seed(tmp_path):
    source, out = write(tmp_path / "source"), tmp_path / "out"
    path = perturbed(source, out) / "model.safetensors"
    whole, made = load_file(path), path.stat().st_mtime_ns
    assert perturbed(source, out) == out and path.stat().st_mtime_ns == made
    path.write_bytes(path.read_bytes()[:-1])
    assert perturbed(source, out) == out and (load_file(path)["embed"] == whole["embed"]).all()
    perturbed(source, out, seed=2)
    assert (load_file(path)["embed"] != whole["embed"]).any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_what_is_no_copy_is_kept(tmp_path):
    source, out = write(tmp_path / "source"), tmp_path / "thesis"
    out.mkdir()
    (out / "chapter-1.txt").touch()
    with pytest.raises(BadInput, match="in the way"):
        perturbed(source, out)
    assert [path.name for path in out.iterdir()] == ["chapter-1.txt"]


@pytest.mark.parametrize("weight_map", [
    {"a": 5}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": "model.bin"}, {"a": ["x"]}, None, {"a": None},
])  # fmt: skip
def test_an_index_that_leaves_the_folder_or_is_none_is_one_line(tmp_path, loaded, weight_map):
    folder = write(tmp_path / "odd")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    reason = refusal(str(folder), loaded, LAYERS)
    assert reason.startswith(f"weights folder {folder}: model.safetensors.index.json ") and "\n" not in reason


def test_an_index_nested_too_deep_is_one_line(tmp_path, loaded):
    folder = write(tmp_path / "deep")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "cannot be read: RecursionError" in refusal(str(folder), loaded, LAYERS)


def test_a_digest_names_the_content(tmp_path):
    one, same = write(tmp_path / "one"), write(tmp_path / "same")
    other = write(tmp_path / "other", TENSORS | {"embed": EMBEDDING + 1e-3})
    digests = [weights_digest(str(folder)) for folder in (one, same, other)]
    assert digests[0] == digests[1] != digests[2] and re.fullmatch("[0-9a-f]{16}", digests[0])
    assert checked_digest(str(one)) == digests[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value, kind):
    broken = EMBEDDING.astype(kind)
    broken[3, 2] = value
    folder = write(tmp_path / "broken", TENSORS | {"embed": broken})
    with pytest.raises(ValueError, match=f"^weights folder {folder}: embed has a value that is not a finite number$"):
        checked_digest(str(folder))


def test_a_folder_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    folder, digests = write(tmp_path / "written"), iter(("before", "after"))
    monkeypatch.setattr(weight_loading, "weights_digest", lambda _: next(digests))
    with pytest.raises(ValueError, match="it was written to meanwhile"):
        checked_digest(str(folder))


def test_a_folder_without_weights_has_no_digest(tmp_path):
    with pytest.raises(ValueError, match="no such folder on this machine"):
        weights_digest(str(tmp_path / "nothing"))


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/x"), OSError(36, "File name too long")])
def test_a_folder_that_may_not_be_looked_at_is_refused_and_raises_in_no_rank(loaded, monkeypatch, error):
    """Of several ranks, vLLM reads the answers up to the first that raises, and gives the others to the next call."""

    def is_dir(path):
        raise error

    monkeypatch.setattr(Path, "is_dir", is_dir)
    words = f"weights folder /x/y: cannot be read: {type(error).__name__}: {error}"
    assert refusal("/x/y", loaded, LAYERS) == words
    with pytest.raises(ValueError, match=re.escape(words)):
        weights_digest("/x/y")
