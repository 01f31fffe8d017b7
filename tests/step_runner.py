"""A model runner as samplers see it, in the midst of a step: its batch, its requests and its tensors of positions."""

from types import SimpleNamespace

import numpy as np
import torch

from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.sampler import extra_args

PROMPT = 9


def chunk(i, forced=None, context=PROMPT, **sampling):
    key = int(np.random.default_rng(i).integers(0, 2**64, dtype=np.uint64))
    tokens = np.zeros(context, np.int32)
    return ChunkRequest(f"r{i}", key, tokens, PROMPT, 8, SamplingParams(**sampling), 0, forced=forced)


def runner_of(chunks, drafts=None, device="cpu", tolerance=0.0, stops=False, inside=()):
    """The runner in a step of last tokens and drafts. `inside`: indexes of requests that are still in their prompt."""
    counts = np.array([len(d) for d in drafts or [[]] * len(chunks)])
    first = np.array([len(c.token_ids) for c in chunks], np.int32)
    place = np.where(np.isin(np.arange(len(chunks)), inside), first - 3, first)  # of the token after a row
    positions = np.concatenate([place[i] - 1 + np.arange(count + 1) for i, count in enumerate(counts)])
    starts = np.concatenate([[0], np.cumsum(counts + 1)]).astype(np.int32)
    args = [extra_args(c, 2, tolerance=tolerance, stops=stops) for c in chunks]
    states = {
        c.chunk_id: SimpleNamespace(req_id=c.chunk_id, sampling_params=SimpleNamespace(extra_args={"tailrace": a}))
        for c, a in zip(chunks, args, strict=True)
    }
    batch = SimpleNamespace(req_ids=list(states), num_reqs=len(chunks), num_tokens_no_spec=first)
    return SimpleNamespace(
        input_batch=batch,
        requests=states,
        positions=torch.from_numpy(positions).to(device),
        query_start_loc=SimpleNamespace(gpu=torch.from_numpy(starts).to(device)),
    )


def metadata_of(drafts, device="cpu"):
    """vLLM's metadata of these drafts, rows laid out as its model runner does: per request its drafts, then bonus."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device(device))
    ends = np.cumsum([len(d) + 1 for d in drafts])
    rows = np.arange(ends[-1])
    metadata.bonus_logits_indices = torch.from_numpy(ends - 1).to(device)
    metadata.target_logits_indices = torch.from_numpy(np.setdiff1d(rows, ends - 1)).to(device)
    metadata.logits_indices = torch.from_numpy(rows).to(device)
    return metadata
