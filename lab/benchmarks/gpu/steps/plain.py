"""Times stock vLLM's engine, worker and sampler, stepped in this process like our engine."""

import time

from tailrace.deployments.vllm_exact import launch
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.lab.benchmarks.gpu.steps import decoding
from tailrace.lab.benchmarks.gpu.steps.engine import KV_GIB, config_of, made, vocabulary_of
from tailrace.policies.protocol.exactness import Exactness


def inputs(place: Place, level: Exactness, shape: str = "135M", runner: str = "v1", ahead: bool = False):
    """Returns the arguments and environment variables that vLLM would get on a GPU, and whether steps run ahead."""
    sizes = {"running": 256, "draft": "off"}
    config = config_of(place._replace(card=True), f"a folder of {shape}", level=level, runner=runner, **sizes)
    return ahead, without_our_worker(config), launch.process_settings(config, None)


def without_our_worker(config: EngineConfig) -> dict:
    """Returns vLLM's arguments of a configuration, without our worker."""
    return {name: value for name, value in launch.engine_arguments(config).items() if name != "worker_cls"}


def plain(step: Measurements, level: Exactness, shape: str = "135M", runner: str = "v1", ahead: bool = False) -> None:
    """Times steps with 8, 64 and 256 samples, without logprobs and with those of the tokens, which our engine always
    returns.

    `level`: with `law` vLLM chooses its kernels itself. `runner`: its model runner. `ahead`: whether asynchronous
    scheduling is on; on CPUs it is off.
    """
    found: list[PlainEngine] = []

    def start() -> dict:
        began_s = time.perf_counter()
        model, arguments = made(step.place, shape)
        sizes = {"running": 256, "gib": KV_GIB.get(shape, 8.0)}
        config = config_of(step.place, model, draft="off", level=level, runner=runner, **sizes, **arguments)
        found.append(PlainEngine(config, vocabulary_of(step.place, shape), ahead and step.place.card))
        return {"start_s": time.perf_counter() - began_s}

    step.must(f"start of {shape}", start)
    for samples in step.place.of(decoding.SAMPLES, (2,)):
        for logprobs, what in ((None, f"{samples} samples"), (0, f"{samples} samples, logprobs")):
            found[0].logprobs = logprobs
            step.tried(what, lambda samples=samples: decoding.timed(step, found[0], samples))


class PlainEngine:
    """Stock vLLM, and the samples that it decodes. `logprobs`: vLLM's sampling parameter of new samples."""

    def __init__(self, config: EngineConfig, vocabulary: int, ahead: bool):
        stock = without_our_worker(config)
        arguments, launch.engine_arguments = launch.engine_arguments, lambda _config: stock
        try:
            self.llm = launch.launch(config, 0, ahead=ahead)
        finally:
            launch.engine_arguments = arguments
        self._vocabulary, self._answer_tokens = vocabulary, min(decoding.ANSWER_TOKENS, config.max_model_len // 2)
        self._begun, self._tokens, self._names = 0, 0, []
        self.logprobs: int | None = None

    def begin(self, samples: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._begun += 1
        settings = {"temperature": 1.0, "max_tokens": self._answer_tokens, "ignore_eos": True, "detokenize": False}
        settings |= {"output_kind": RequestOutputKind.DELTA, "logprobs": self.logprobs}
        params, waiting = SamplingParams(**settings), set()
        for number in range(samples):
            tokens = decoding.prompt(1_000_000 + 1_000 * self._begun + number // decoding.GROUP, self._vocabulary)
            name = f"{self._begun}-{number}"
            waiting.add(name)
            self._names.append(self.llm.add_request(name, tokens_input(tokens.tolist()), params))
        while waiting:
            waiting -= {output.request_id for output in self.llm.step()}

    def turn(self) -> None:
        self._tokens += sum(len(output.outputs[0].token_ids) for output in self.llm.step())

    def made(self) -> int:
        return self._tokens

    def end(self) -> None:
        self.llm.abort_request(self._names, internal=True)
        self._names.clear()
        while self.llm.has_unfinished_requests():
            self.llm.step()
