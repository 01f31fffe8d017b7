"""The workload with adapters: of every three prompts the model alone answers one, and an adapter each of the others.

The adapters are random, made for the served model and loaded for one run. Called by lab/verification/tokens.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.deployments.staging.adapter_folder import CONFIG, PREFIX, TENSORS
from tailrace.deployments.staging.safetensors_header import read_header

NAMES = ("verify-one", "verify-two")
RANK = 8

SIZE = 0.02
"""Size of a change of weights, relative to their own deviation of 1 / sqrt(inputs): it turns a word in ten."""

LAYERS = (".self_attn.", ".mlp.")
"""Parts of the names of weights that get adapters."""


def adapted(batch: RolloutBatch) -> RolloutBatch:
    """Returns the same prompts and keys, with the adapters by turns."""
    by_turns = (None, *NAMES)
    groups = (
        group.model_copy(update={"adapter": by_turns[number % len(by_turns)]})
        for number, group in enumerate(batch.groups)
    )
    return batch.model_copy(update={"groups": tuple(groups)})


@asynccontextmanager
async def adapters_of(client: RolloutClient) -> AsyncIterator[None]:
    """Loads two adapters meanwhile, under NAMES."""
    model = Path((await client.status()).model)
    with TemporaryDirectory(prefix="tailrace-adapters-") as folder:
        for seed, name in enumerate(NAMES):
            path = Path(folder) / name
            await asyncio.to_thread(make_adapter, model, path, seed)
            await client.load_adapter(name, str(path))
        yield
        for name in NAMES:
            await client.unload_adapter(name)


def make_adapter(model: Path, folder: Path, seed: int) -> None:
    """Writes a random adapter of a model's attention and feed-forward layers, in PEFT's form."""
    from safetensors.numpy import save_file

    chance, tensors = np.random.default_rng(seed), {}
    for file in sorted(model.glob("*.safetensors")):
        for name, entry in read_header(file)[0].items():
            module, shape = name.removesuffix(".weight"), entry.get("shape", ())
            if len(shape) != 2 or not any(part in name for part in LAYERS):
                continue
            outputs, inputs = shape
            a = chance.standard_normal((RANK, inputs)) * SIZE / inputs**0.5
            b = chance.standard_normal((outputs, RANK)) / RANK**0.5
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / TENSORS)
    modules = sorted({name.split(".")[-3] for name in tensors})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(settings))
