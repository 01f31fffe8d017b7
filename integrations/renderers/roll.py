"""Samples by prime-rl's data plane: `python roll.py ADDRESS TOKEN MODEL`, in an environment with renderers 0.1.12.

`renderers.client.generate` renders messages, asks the gateway for tokens and parses the answer, as verifiers' train
client has it do. Prints one JSON object per sample. Run by tests/live/trainers/test_renderers.py.
"""

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI
from renderers import DefaultRendererConfig, create_renderer
from renderers.client import generate
from transformers import AutoTokenizer


async def main(address: str, token: str, model: str) -> None:
    renderer = create_renderer(AutoTokenizer.from_pretrained(model), DefaultRendererConfig())
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key=token) as client:
        for index in range(3):
            headers = {"X-Session-ID": f"rollout-{index}", "X-Tailrace-Group": "sky", "X-Tailrace-Index": str(index)}
            found = await generate(
                client=client,
                renderer=renderer,
                messages=[{"role": "user", "content": "Why is the sky blue?"}],
                model=Path(model).name,
                sampling_params={"temperature": 1.0, "max_tokens": 12},
                cache_salt="0",
                priority=0,
                extra_headers=headers,
            )
            names = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason")
            print(json.dumps({name: found[name] for name in names}))


asyncio.run(main(*sys.argv[1:]))
