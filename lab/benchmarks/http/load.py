"""The load of `tailrace bench http`: many completions, all requested at once, by a process of its own.

    python -m tailrace.lab.benchmarks.http.load URL MODEL TURN REQUESTS MAX_TOKENS TEMPERATURE

Prints one JSON object: `seconds`, `latencies_s` of the answers, and `errors` by kind. The load is the same for
every server.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from random import Random

import aiohttp

PROMPT_TOKENS = 32
GROUP = 8
"""Number of requests with the same prompt, as the samples of a group."""


def body_of(model: str, turn: int, number: int, max_tokens: int, temperature: float = 1.0) -> dict:
    """Returns the body of request `number` of a turn. No prompt of one turn comes again in another."""
    draw = Random(1_000_003 * turn + number // GROUP)
    prompt = [draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    sampled = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True, "logprobs": 0}
    return {"model": model, "prompt": prompt} | sampled


async def load(url: str, model: str, turn: int, requests: int, max_tokens: int, temperature: float = 1.0) -> dict:
    """Sends all requests at once, each on a connection of its own. Returns the figures once all have ended."""
    latencies: list[float] = []
    errors: Counter[str] = Counter()
    bodies = [json.dumps(body_of(model, turn, number, max_tokens, temperature)).encode() for number in range(requests)]

    async def one(body: bytes) -> None:
        began_s = time.monotonic()
        try:
            async with session.post("/v1/completions", data=body, headers={"content-type": "application/json"}) as got:
                answer = await got.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            errors[type(error).__name__] += 1
            return
        if got.status != 200 or answer["usage"]["completion_tokens"] != max_tokens:
            errors[str(got.status)] += 1
            return
        latencies.append(time.monotonic() - began_s)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        began_s = time.monotonic()
        await asyncio.gather(*map(one, bodies))
        seconds = time.monotonic() - began_s
    return {"seconds": seconds, "latencies_s": latencies, "errors": dict(errors)}


if __name__ == "__main__":
    address, served, *numbers, heat = sys.argv[1:]
    print(json.dumps(asyncio.run(load(address, served, *map(int, numbers), float(heat)))))
