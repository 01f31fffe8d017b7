"""A trainer's own score of its weights, to compare the replicas with: `client.send_weights(..., score=...)`."""

from tailrace.deployments.messages.scores import SCORED, Score


def weights_score(model) -> Score:
    """Returns a causal model's logprobs of the fixed sequence, without a gradient. `model`: of torch, as transformers
    call it: `model(input_ids=...).logits`, float[1, tokens, vocabulary].
    """
    import torch

    ids = torch.tensor([SCORED], device=next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    finally:
        model.train(was_training)
    return tuple(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
