"""Capture an agent that knows nothing of this service, and print the training rows of its turns.

python examples/agent.py http://127.0.0.1:8000 [TOKEN]
"""

import sys

import openai

from tailrace.http import Client

client = Client(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
trajectory = client.trajectory_blocking(group="task-7", index=0, seed=1, limits={"turns": 20})

agent = openai.OpenAI(base_url=trajectory.base_url, api_key=trajectory.api_key)  # any harness, unmodified
messages = []
for question in ("Name a river.", "Where does it end?", "How long is it?"):
    messages.append({"role": "user", "content": question})
    answer = agent.chat.completions.create(model="any", messages=messages, max_tokens=24)
    messages.append(answer.choices[0].message)

found = trajectory.reward_blocking(1.0)
for row in found.rows:
    versions = {span.version for turn in row.turns for span in turn.weight_versions}
    print(f"{len(row.token_ids)} tokens, {sum(row.mask)} sampled in {len(row.turns)} turns under weights {versions}")
print(f"{found.branches} branches, {found.reencoded_tokens} sampled tokens encoded again")
client.close()
