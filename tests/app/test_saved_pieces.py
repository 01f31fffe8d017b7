"""The pieces of a mixture of experts are those of its saved folder, however its parameters are cut."""

from itertools import pairwise

import pytest
import torch

from tailrace.app.weights.held_pieces import Slice, held_pieces
from tailrace.app.weights.saved_pieces import saved_pieces
from tailrace.deployments.staging.stage import StageRefused

SIZES = {"hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
SIZES |= {"vocab_size": 20, "num_hidden_layers": 2}


def qwen():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    mixture = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **mixture))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2))


def saved(model) -> dict[str, torch.Tensor]:
    """The tensors as transformers itself saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(model.state_dict())))


def cut(tensor: torch.Tensor, dim: int, ranks: int) -> list[Slice]:
    """Parts of a tensor for ranks, along a dimension that it may not have; some are empty."""
    dim = min(dim, tensor.ndim - 1)
    ends = [tensor.shape[dim] * each // ranks for each in range(ranks + 1)]
    starts = [tuple(low if each == dim else 0 for each in range(tensor.ndim)) for low in ends[:-1]]
    parts = [tensor.narrow(dim, low, high - low) for low, high in pairwise(ends)]
    return [Slice(part, tuple(tensor.shape), start) for part, start in zip(parts, starts, strict=True)]


@pytest.mark.parametrize("make", [qwen, mixtral])
@pytest.mark.parametrize(("dim", "ranks"), [(0, 1), (0, 2), (0, 7), (1, 3), (2, 2)])
def test_pieces_of_all_ranks_are_the_saved_folder(make, dim, ranks):
    model = make()
    wanted, of_ranks = saved(model), [{} for _ in range(ranks)]
    for name, tensor in model.state_dict().items():
        for held, part in zip(of_ranks, cut(tensor, dim, ranks), strict=True):
            held[name] = part
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}
    for held in of_ranks:
        for one in saved_pieces(model, held_pieces(held)):
            box = tuple(slice(s, s + e) for s, e in zip(one.piece.start, one.piece.extent, strict=True))
            whole = found[one.piece.tensor.name]
            assert one.piece.tensor.shape == tuple(whole.shape) and whole[box].isnan().all(), "a value of two pieces"
            whole[box] = one.values
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_model_s_pieces_are_views_of_its_parameters():
    model = qwen()
    pieces = {one.piece.tensor.name: one.values for one in held_pieces(model)}
    assert pieces.keys() == saved(model).keys()
    up = pieces["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert up.untyped_storage().data_ptr() == model.model.layers[1].mlp.experts.gate_up_proj.data_ptr()


def test_what_transformers_makes_in_another_way_is_refused():
    from transformers.core_model_loading import Transpose, WeightConverter

    model = qwen()
    turned = WeightConverter("lm_head.turned", "lm_head.weight", operations=[Transpose(0, 1)])
    model._weight_conversions = [turned]
    with pytest.raises(StageRefused, match=r"^transformers saves lm_head.turned by Transpose, which is not known"):
        held_pieces(model)
