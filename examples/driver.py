"""Roll out one prompt on a running service (`make serve`), and report rewards. Needs RAY_AUTH_MODE=token."""

from tailrace import PromptGroup, RolloutBatch, connect

client = connect()
prompts = [PromptGroup(prompt_id="sky", text="Why is the sky blue?", samples=8, max_tokens=128)]
for group in client.rollout_blocking(RolloutBatch(batch_id="step-0", groups=prompts, seed=1, step=0)):
    rewards = [float(len(sample.token_ids)) for sample in group.samples]
    print(group.prompt_id, rewards)
    client.record_rewards_blocking(group, rewards)
