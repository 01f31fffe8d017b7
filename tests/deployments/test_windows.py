"""Canonical windows without an engine: shapes of products, pieces of requests, models that are refused."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from tailrace.deployments.vllm_exact.windows import (
    SIZES,
    WINDOW,
    WindowedProduct,
    Windows,
    attend_in_pieces,
    check_fits,
    divided,
    equal_sizes,
    pieces,
    rows_compared,
)


class Counted:
    """A layer's product that keeps the shapes it was called with."""

    def __init__(self):
        self.shapes = []

    def __call__(self, x, weight, bias):
        assert x.is_contiguous()
        self.shapes.append(tuple(x.shape))
        return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("sizes", [(WINDOW,), (4, 16, 64)])
@pytest.mark.parametrize("rows", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW + 3])
def test_every_product_has_the_shape_of_a_window_and_rows_of_zeros_add_nothing(rows, sizes):
    counted, weight, bias = Counted(), torch.randn(6, 4), torch.randn(6)
    x = torch.randn(4, rows).T  # not contiguous
    found = WindowedProduct(counted, sizes)(x, weight, bias)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))
    assert {shape[0] for shape in counted.shapes} <= set(sizes) and counted.shapes
    if rows:
        assert torch.equal(WindowedProduct(Counted(), sizes)(x.reshape(1, rows, 4), weight, bias)[0], found)


@pytest.mark.parametrize(
    ("rows", "windows"),
    [
        (0, [2]),
        (1, [2]),
        (4, [4]),
        (5, [4, 2]),
        (6, [8]),
        (16, [16]),
        (40, [32, 8]),
        (63, [64]),
        (600, [256, 256, 64, 32]),
    ],
)
def test_windows_are_few_and_nearly_full(rows, windows):
    assert divided(rows, SIZES) == windows
    assert divided(40, (16,)) == [16, 16, 16]


def test_sizes_with_other_bits_are_left_out_and_a_place_that_counts_is_refused():
    weight = torch.randn(32, 1_024)
    rows = torch.randn(max(rows_compared(1_024, size) for size in SIZES) + WINDOW, 32)
    assert equal_sizes(lambda x: x.double() @ weight.double() > 0, rows, 1_024) == SIZES
    assert equal_sizes(lambda x: x @ weight > 9 * (len(x) in (4, 64)), rows, 1_024) == (2, 8, 16, 32, 128, 256)
    with pytest.raises(ValueError, match="depends on a row's place; write exactness: law"):
        equal_sizes(lambda x: x[:, :1] + torch.arange(len(x))[:, None] + weight[:1], rows, 1_024)


def test_a_size_is_left_out_that_has_one_other_result_in_50_000():
    weight, rows = torch.randn(32, 128, dtype=torch.double), torch.randn(rows_compared(128, 2) + WINDOW, 32)

    def product(x):
        exact = x.double() @ weight
        return (exact + 1e-4 * (len(x) <= 4)).bfloat16()  # rounds to another one where it is next to a border

    assert equal_sizes(lambda x: (x.double() @ weight).bfloat16(), rows, 128) == SIZES
    assert equal_sizes(product, rows, 128) == SIZES[2:]


def test_layers_are_wrapped_once_and_again_after_a_load():
    packed, plain = torch.nn.Linear(2, 1_024), torch.nn.Linear(2, 2)
    packed.cpu_linear = counted = Counted()
    model, windows = torch.nn.Sequential(packed, plain), Windows()
    windows.wrap(model)
    checked, first = len(counted.shapes), packed.cpu_linear
    windows.wrap(model)
    assert packed.cpu_linear is first and isinstance(first, WindowedProduct) and not hasattr(plain, "cpu_linear")
    packed.cpu_linear = counted  # as vLLM does when it loads weights
    windows.wrap(model)
    assert isinstance(packed.cpu_linear, WindowedProduct)
    assert len(counted.shapes) == checked + 1, "a shape of weights is checked once"


@dataclass
class Metadata:
    """The fields of vLLM's CommonAttentionMetadata that pieces change."""

    num_reqs: int
    max_query_len: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor

    def replace(self, **changes):
        return replace(self, **changes)


def batch(queries, contexts):
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    tables = torch.arange(len(queries)).int()[:, None] + 10
    return Metadata(len(queries), max(queries), starts, starts, torch.tensor(contexts).int(), tables)


def test_each_piece_attends_to_what_its_tokens_may_see():
    found = pieces(batch([1, 9, 4, 8], [30, 109, 4, 8]), 4)
    assert found.query_start_loc.tolist() == [0, 1, 5, 9, 10, 14, 18, 22] == found.query_start_loc_cpu.tolist()
    assert found.seq_lens.tolist() == [30, 104, 108, 109, 4, 4, 8]
    assert found.block_table_tensor[:, 0].tolist() == [10, 11, 11, 11, 12, 13, 13]
    assert (found.num_reqs, found.max_query_len) == (7, 4)
    assert found.query_start_loc.dtype == found.seq_lens.dtype == torch.int32
    decoding = batch([1, 4], [9, 30])
    assert pieces(decoding, 4) is decoding


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(8, 8, 8), (8, 4, 4), (8, 1, 1), (9, 3, 8), (64, 4, 8)])
def test_a_piece_has_as_many_heads_rows_as_the_smallest_tile(heads, kv_heads, tokens):
    built = []
    builder = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, build=lambda *args: built.append(args))
    attend_in_pieces(builder)
    builder.build(common_prefix_len=0, common_attn_metadata=batch([20], [20]))
    assert built[0][1].max_query_len == tokens and built[0][1].num_reqs == -(-20 // tokens)


def config(**changes):
    plain = {"is_moe": False, "is_hybrid": False, "is_attention_free": False, "use_mla": False, "is_quantized": False}
    model = SimpleNamespace(**plain | {"quantization": None, "is_multimodal_model": False} | changes)
    return SimpleNamespace(model_config=model, lora_config=None, parallel_config=SimpleNamespace(world_size=1))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"is_moe": True}, "mixtures of experts"),
        ({"is_hybrid": True}, "linear attention"),
        ({"use_mla": True}, "latent attention"),
        ({"quantization": "fp8"}, "quantized weights"),
        ({"is_multimodal_model": True}, "images"),
    ],
)
def test_models_that_compute_otherwise_are_refused_in_one_line(changes, named):
    check_fits(config())
    with pytest.raises(ValueError, match=rf"not with {named}.*write exactness: law, or dtype: float32$"):
        check_fits(config(**changes))
