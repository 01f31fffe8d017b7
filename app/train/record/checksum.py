"""A checksum of all parameters of a model: equal if and only if every bit is."""

import torch
from blake3 import blake3


def weights_checksum(model: torch.nn.Module) -> str:
    """Returns 16 hex digits over names, shapes, types and values, in the model's own order."""
    digest = blake3()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).flatten().numpy())
    return digest.hexdigest()[:16]
