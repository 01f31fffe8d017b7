"""Each field of vLLM's requests with edge values: taken or refused by the gateway, beside vLLM's own parser.

    python integrations/suites/fields.py [--url ADDRESS --token TOKEN] [--field NAME]

The reference is the installed vLLM: its request model, and the sampling parameters that it makes of it. Without an
address the gateway is over the simulated cluster. Exit code: 0 if `fields.toml` explains each difference, 1 if not,
2 for bad input.
"""

import argparse
import json
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

INT32, INT64 = 2**31, 2**63
VALUES = (
    None, True, False, 0, 1, 2, 21, -1, -2, 0.5, 1.5, 2.5, -0.5, 1e300, INT32 - 1, INT32, INT64 - 1, INT64, -INT64,
    -INT64 - 1, "", "1", "x", [], [None], [1], [-1], ["a"], [""], ["\x00"], [49_151], [49_152], {}, {"a": 1}, {"5": 1},
    {"5": 200},
)  # fmt: skip
"""Usual values of each type, and those at the edges of numbers and of the demo model's vocabulary."""

USER = {"role": "user", "content": "hi"}
NOT_VARIED = {"model", "prompt", "messages", "stream"}
BY_THE_ENGINE = {"max_tokens", "max_completion_tokens", "allowed_token_ids"}
"""vLLM's parser takes any number of these, and its engine refuses what it cannot do."""

REQUEST_S = 30


class Difference(NamedTuple):
    route: str
    field: str
    value: Any
    vllm: str
    gateway: str

    def kind(self) -> tuple[str, str, str]:
        return self.field, self.vllm.partition(":")[0], self.gateway.partition(":")[0]


class Route(NamedTuple):
    """`fields`: all of a request. `body`: of a request with a value of one. `parse`: vLLM's own, which raises."""

    path: str
    fields: list[str]
    body: Callable[[str, Any], dict]
    parse: Callable[[dict], object]

    def varied(self) -> list[str]:
        return sorted({*self.fields} - NOT_VARIED - BY_THE_ENGINE)


def routes() -> list[Route]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.sampling_params import SamplingParams

    def of(path: str, model: type, base: dict) -> Route:
        def parse(body: dict) -> object:
            return model.model_validate(body).to_sampling_params(20, {})

        return Route(path, sorted(model.model_fields), lambda field, value: base | {field: value}, parse)

    def sampling(field: str, value: Any) -> dict:
        return {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2} | {field: value}}

    names = sorted(name for name in SamplingParams.__annotations__ if not name.startswith("_"))
    return [
        of("/v1/completions", CompletionRequest, {"prompt": [5, 6], "max_tokens": 2}),
        of("/v1/chat/completions", ChatCompletionRequest, {"messages": [USER], "max_tokens": 2}),
        Route("/inference/v1/generate", names, sampling, GenerateRequest.model_validate),
    ]


def said_by_vllm(route: Route, body: dict) -> str:
    try:
        route.parse(deepcopy(body))
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is its refusal
        return f"refused: {' '.join(str(error).split())[:120]}"
    return "taken"


def said_by_gateway(http, path: str, body: dict) -> str:
    answer = http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    if answer.status_code == 200:
        return "taken"
    if answer.status_code == 400:
        return f"refused: {answer.json()['error']['message'][:120]}"
    return f"status {answer.status_code}: {answer.text[:120]}"


def differences(http, wanted: str | None) -> Iterator[Difference | None]:
    """A difference, or None, for each request."""
    for route in routes():
        for field in route.varied():
            for value in VALUES if wanted in (None, field) else ():
                body = route.body(field, value)
                vllm, gateway = said_by_vllm(route, body), said_by_gateway(http, route.path, body)
                same = vllm.partition(":")[0] == gateway.partition(":")[0]
                yield None if same else Difference(route.path, field, value, vllm, gateway)


def known_reason(found: Difference, known: dict) -> str | None:
    """The reason that `fields.toml` gives for the difference, or None."""
    if found.gateway.startswith("status"):
        return None
    if found.value is None and found.gateway == "taken":
        return known["null"]
    side = "refused_here" if found.gateway.startswith("refused") else "taken_here"
    return known[side].get(found.field)


def report(found: list[Difference], known: dict) -> tuple[list[str], int]:
    """Lines about differences by field and kind, and the number of those without a reason."""
    groups: dict[tuple, list[Difference]] = {}
    for one in found:
        groups.setdefault((one.route, *one.kind(), known_reason(one, known)), []).append(one)
    said, open_ones = [], 0
    for (route, field, vllm, gateway, reason), ones in groups.items():
        values = ", ".join(dict.fromkeys(json.dumps(one.value) for one in ones))
        words = next((text for text in (ones[0].gateway, ones[0].vllm) if ":" in text), "")
        said.append(f"{route} {field}: vLLM {vllm}, gateway {gateway}: {values[:150]}")
        said.append(f"    {f'known: {reason}' if reason else words}")
        open_ones += 0 if reason else len(ones)
    return said, open_ones


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a gateway of the demo model that runs already")
    parser.add_argument("--token", default="", help="a token of it")
    parser.add_argument("--field", help="this one alone")
    asked = parser.parse_args(words)
    if asked.field is not None and not any(asked.field in route.varied() for route in routes()):
        parser.error(f"--field {asked.field}: no route has a field of this name that is varied")
    import httpx
    from schema import simulated

    known = tomllib.loads((HERE / "fields.toml").read_text())
    with tempfile.TemporaryDirectory(prefix="fields-") as folder:
        given = nullcontext((asked.url, asked.token))
        with given if asked.url else simulated(Path(folder), Path(folder) / "gateway.log") as (url, token):
            headers = {"authorization": f"Bearer {token}"} if token else {}
            with httpx.Client(base_url=url, headers=headers, timeout=REQUEST_S) as http:
                found = list(differences(http, asked.field))
    lines, open_ones = report([one for one in found if one], known)
    differ = sum(one is not None for one in found)
    print("\n".join(lines))
    print(f"fields: {len(found)} requests, {differ} answered otherwise than by vLLM, {open_ones} without a reason")
    return int(open_ones > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
