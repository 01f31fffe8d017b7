"""Size of the deltas that ranks would upload after a step of an optimizer, as a share of all bytes of the weights.

Weights are trained in float32 and sent in bfloat16 or float32. The model samples its own answers, with random
advantages, so gradients have the form of a policy gradient. The first steps of AdamW are not counted.
"""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from tailrace.deployments.staging.deltas import delta_of

WARM_STEPS, STEPS = 3, 2
SAMPLES, ANSWER_TOKENS = 8, 32


def measure(model: Path, rates: tuple[float, ...], say: Callable[[str], None]) -> dict:
    """Returns the figures of `_delta` by type and learning rate, means over STEPS steps."""
    found: dict[str, dict[str, dict]] = {"bfloat16": {}, "float32": {}}
    for rate in rates:
        for kind, row in _of_rate(model, rate).items():
            found[kind][f"{rate:g}"] = row
            say(f"{kind} at {rate:g}: {row}")
    return found


def _of_rate(folder: Path, rate: float) -> dict[str, dict]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    rows: dict[str, list[dict]] = {"bfloat16": [], "float32": []}
    for step in range(WARM_STEPS + STEPS):
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        _step(model, tokenizer, optimizer, step)
        if step >= WARM_STEPS:
            for kind, of in rows.items():
                of.append(_delta(before, model, getattr(torch, kind)))
    return {kind: {key: round(sum(row[key] for row in of) / STEPS, 4) for key in of[0]} for kind, of in rows.items()}


def _step(model, tokenizer, optimizer, step: int) -> None:
    import torch

    prompt = tokenizer(f"What is {step + 3} plus {2 * step + 5}?", return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    with torch.no_grad():
        drawn = model.generate(
            **prompt, do_sample=True, max_new_tokens=ANSWER_TOKENS, num_return_sequences=SAMPLES, pad_token_id=0
        )
    advantages = torch.randn(SAMPLES)
    logprobs = model(input_ids=drawn).logits[:, :-1].float().log_softmax(-1)
    chosen = logprobs.gather(-1, drawn[:, 1:, None])[..., 0][:, length - 1 :]
    loss = -(advantages[:, None] * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _delta(before: dict, model, kind) -> dict:
    """Returns the shares of changed values and of compressed bytes, and the seconds to make and compress the XOR."""
    import numpy as np
    import torch

    whole = small = numbers = changed = compress_s = 0
    for name, value in model.named_parameters():
        one, other = (
            each.detach().to(kind).contiguous().view(torch.uint8).numpy().reshape(-1) for each in (before[name], value)
        )
        flips = np.bitwise_xor(one, other).reshape(-1, kind.itemsize)
        numbers, changed = numbers + len(flips), changed + int(flips.any(-1).sum())
        began_s = monotonic()
        whole, small = whole + one.nbytes, small + len(delta_of(one.data, other.data))
        compress_s += monotonic() - began_s
    return {"share": small / whole, "changed": changed / numbers, "compress_s": compress_s}
