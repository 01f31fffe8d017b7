"""Weights read back from a model that computes with them, and memory that is given back and taken again."""

import errno

import numpy as np
import pytest
import torch

from tailrace.deployments.staging import given_back
from tailrace.deployments.staging.given_back import give_back, trim
from tailrace.deployments.staging.held import ROWS, HeldWeights, is_packed, unpacked, values_of
from tailrace.deployments.staging.received import ReceivedWeights
from tailrace.deployments.staging.slots import Slots, memory_source


class Packed(torch.nn.Module):
    """A layer as vLLM's on a CPU: it multiplies by a copy in another form, and keeps the weight or not."""

    def __init__(self, matrix: torch.Tensor, keep: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(matrix.clone() if keep else torch.empty(0), requires_grad=False)
        self.input_size = matrix.shape[1]
        self.matrix = matrix
        self.cpu_linear = lambda rows, weight, bias: rows @ self.matrix.T


class Layer(torch.nn.Module):
    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns))
        self.bias = torch.nn.Parameter(torch.randn(rows))


class Lora(torch.nn.Module):
    """A layer of LoRA around one of the model."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.base_layer = layer
        self.weight = torch.nn.Parameter(torch.zeros(1, 1))


class Model(torch.nn.Module):
    """Its attention's three matrices are joined, as vLLM's are."""

    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        torch.manual_seed(0)
        self.attn = torch.nn.Module()
        self.attn.qkv_proj = Layer(8, 3)
        self.out = Lora(Layer(2, 3))
        self.head = Packed(torch.randn(4, 3), keep=False)
        self.tied = Packed(torch.randn(4, 3), keep=True)
        self.scale = torch.nn.Module()
        self.scale.value = torch.nn.Parameter(torch.tensor(2.0))


SHAPES = {
    "attn.q_proj.weight": (4, 3), "attn.k_proj.weight": (2, 3), "attn.v_proj.weight": (2, 3), "attn.q_proj.bias": (4,),
    "attn.k_proj.bias": (2,), "attn.v_proj.bias": (2,), "out.weight": (2, 3), "head.weight": (4, 3),
    "tied.weight": (4, 3), "scale.value": (),
}  # fmt: skip


def saved_of(model: Model) -> dict[str, torch.Tensor]:
    joined = model.attn.qkv_proj
    rows = {"q_proj": slice(0, 4), "k_proj": slice(4, 6), "v_proj": slice(6, 8)}
    parts = {f"attn.{name}.weight": joined.weight[of] for name, of in rows.items()}
    parts |= {f"attn.{name}.bias": joined.bias[of] for name, of in rows.items()}
    others = {"out.weight": model.out.base_layer.weight, "scale.value": model.scale.value}
    packed = {"head.weight": model.head.matrix, "tied.weight": model.tied.matrix}
    return {name: tensor.detach().clone() for name, tensor in (parts | others | packed).items()}


def test_each_saved_tensor_is_read_back_under_its_own_name():
    model = Model()
    saved = saved_of(model)
    held = HeldWeights(model, SHAPES)
    found = dict(held)
    assert list(found) == sorted(SHAPES) and all(found[name].equal(saved[name]) for name in SHAPES)
    assert all(tensor.is_contiguous() for tensor in found.values())
    assert held.unlike(iter(saved.items())) == []


def test_weights_that_are_not_the_saved_ones_are_named_and_no_others():
    model = Model()
    saved = saved_of(model)
    held = HeldWeights(model, SHAPES)
    with torch.no_grad():
        model.attn.qkv_proj.weight[5, 0] += 1
        model.head.matrix = model.head.matrix + 1
    assert held.unlike(iter(saved.items())) == ["attn.k_proj.weight", "head.weight"]


def test_a_packed_copy_that_was_not_renewed_is_named():
    model = Model()
    saved = saved_of(model)
    with torch.no_grad():
        model.tied.weight += 1
    saved["tied.weight"] += 1
    assert HeldWeights(model, SHAPES).unlike(iter(saved.items())) == ["tied (packed)"]


def test_saved_values_are_compared_in_the_model_s_type():
    model = Model()
    saved = saved_of(model)
    with torch.no_grad():
        model.out.base_layer.weight = torch.nn.Parameter(model.out.base_layer.weight.to(torch.bfloat16))
    assert HeldWeights(model, SHAPES).unlike(iter(saved.items())) == []


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("attn.z_proj.weight", (2, 3), "tensor attn.z_proj.weight is not found in the running model"),
        ("mlp.weight", (2, 3), "tensor mlp.weight is not found"),
        ("out.weight", (2, 4), r"tensor out.weight is \(2, 3\) in the running model, saved as \(2, 4\)"),
        ("out.weight", (3, 3), r"tensor out.weight is \(2, 3\)"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_an_error(name, shape, words):
    with pytest.raises(ValueError, match=words):
        dict(HeldWeights(Model(), SHAPES | {name: shape}))


def test_checksums_name_the_values_and_zeros_have_no_sign():
    model = Model()
    before = HeldWeights(model, SHAPES).checksums()
    assert before.keys() == SHAPES.keys() and len(set(before.values())) == len(SHAPES)
    with torch.no_grad():
        model.attn.qkv_proj.weight[5, 0] = 0.0
    zero = HeldWeights(model, SHAPES).checksums()
    assert [name for name in SHAPES if zero[name] != before[name]] == ["attn.k_proj.weight"]
    with torch.no_grad():
        model.attn.qkv_proj.weight[5, 0] = -0.0
    assert HeldWeights(model, SHAPES).checksums() == zero
    model.register_buffer("steps", torch.arange(3))
    assert HeldWeights(model, {"steps": (3,)}).module_of("steps")[0] is model
    assert HeldWeights(model, {"steps": (3,)}).checksums().keys() == {"steps"}, "whole numbers have no signed zero"


@pytest.mark.parametrize("inputs", [1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 3])
@pytest.mark.parametrize("keep", [True, False])
def test_a_packed_matrix_is_exact_however_wide(inputs, keep):
    torch.manual_seed(inputs)
    layer = Packed(torch.randn(3, inputs), keep)
    assert is_packed(layer) and unpacked(layer).equal(layer.matrix)
    assert values_of(layer, "weight").equal(layer.matrix)


def test_a_layer_without_a_packed_copy_gives_its_own_values():
    layer = Layer(2, 3)
    assert not is_packed(layer) and values_of(layer, "bias").equal(layer.bias.detach())
    layer.cpu_linear = torch.nn.functional.linear
    assert not is_packed(layer) and values_of(layer, "weight").equal(layer.weight.detach())
    empty = Packed(torch.randn(2, 3), keep=False)
    empty.bias = torch.nn.Parameter(torch.empty(0))
    assert values_of(empty, "bias").numel() == 0, "a packed copy is of the weight alone"


PAGE = 4096


def pages(count: int, value: int = 7) -> torch.Tensor:
    """Whole pages of private memory, which begin at one."""
    whole = np.full((count + 1) * PAGE, value, np.uint8)
    first = -whole.ctypes.data % PAGE
    return torch.from_numpy(whole[first : first + count * PAGE])


def test_whole_pages_are_given_back_and_read_as_zeros_until_they_are_written(monkeypatch):
    monkeypatch.setattr(given_back.os, "sysconf", lambda name: PAGE)
    small, tensor, empty = torch.full((10,), 5, dtype=torch.uint8), pages(3), torch.empty(0)
    views = [tensor[:10], tensor[PAGE:]]
    assert give_back([small, empty, tensor, *views]) == 3 * PAGE, "each storage once"
    assert tensor.count_nonzero() == 0 and (small == 5).all()
    tensor[1] = 9
    assert views[0][1] == 9, "views stay valid"
    trim()


def test_pages_that_a_tensor_shares_with_others_are_kept():
    memory = pages(4)
    part = torch.frombuffer(memoryview(memory.numpy())[100 : 4 * PAGE - 100], dtype=torch.uint8)
    assert give_back([part]) == 2 * PAGE
    assert (memory[:PAGE] == 7).all() and (memory[3 * PAGE :] == 7).all()
    assert memory[PAGE : 3 * PAGE].count_nonzero() == 0


def test_memory_that_the_system_does_not_take_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(given_back, "MADV_DONTNEED", 12345)
    with pytest.raises(OSError) as refused:
        give_back([pages(1)])
    assert refused.value.errno == errno.EINVAL


def test_received_tensors_are_copies_and_are_staged_once(tmp_path, monkeypatch):
    from tailrace.deployments.staging import received as module

    monkeypatch.setattr(module, "Slots", lambda service: Slots(service, tmp_path))
    received, buffer = ReceivedWeights(), torch.ones(3)
    with pytest.raises(ValueError, match="weights 4: no tensor was received"):
        received.stage("app-0", 4, (0, ""))
    assert received.load_weights(iter([("a", buffer)])) == {"a"}
    buffer += 1
    assert received.load_weights([("b", buffer)]) == {"b"} and received.tensors["a"].equal(torch.ones(3))
    source = memory_source(received.stage("app-0", 4, (0, "")))
    assert list(Slots("app-0", tmp_path).held()) == [(4, source.digest)] and received.tensors == {}


def test_received_tensors_that_do_not_fit_are_dropped(tmp_path, monkeypatch):
    from tailrace.deployments.staging import received as module

    monkeypatch.setattr(module, "Slots", lambda service: Slots(service, tmp_path))
    received = ReceivedWeights()
    received.load_weights([("a", torch.ones(3)), ("b", torch.ones(3, dtype=torch.complex64))])
    with pytest.raises(ValueError, match=r"tensor b is a Tensor of torch\.complex64"):
        received.stage("app-0", 4, (0, ""))
    assert received.tensors == {} and Slots("app-0", tmp_path).held() == {}
    assert not Slots("app-0", tmp_path).part.exists()
