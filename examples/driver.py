"""Roll out one prompt on a running service (`make serve`), and report rewards. Needs RAY_AUTH_MODE=token."""

from tailrace import PromptGroup, RolloutBatch, connect

client = connect()
prompts = [PromptGroup(prompt_id="sky", text="Why is the sky blue?", samples=8, max_tokens=128)]
for group in client.rollout_blocking(RolloutBatch(batch_id="step-0", groups=prompts, seed=1, step=0)):
    for sample in group.samples:
        versions = {segment.weights_version for segment in sample.segments}
        print(group.prompt_id, sample.sample_index, sample.finish_reason, versions, sum(sample.logprobs))
    client.record_rewards_blocking(group, [float(len(sample.token_ids)) for sample in group.samples])
