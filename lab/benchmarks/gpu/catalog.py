"""The steps of `make gpu-check` in order of value: the steps of a first and a second call of minutes each, then the
others.

docs/measurements/gpu.md says what each step shows, and has the results.
"""

from tailrace.lab.benchmarks.gpu.driver import CheckStep

ROOM = "tailrace.lab.benchmarks.gpu.steps"
EAGER = {"TAILRACE_GPU_EAGER": "1"}
"""Environment variables of a second try without torch.compile and CUDA graphs."""

BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
"""Environment variables of a second try with CUDA graphs and without torch.compile."""


def _ours(name: str, expected_s: float, limit_s: float, call: int, shows: str, **settings) -> CheckStep:
    """Returns a step that measures tokens and times of our engine with CUDA graphs."""
    run, second = f"{ROOM}.ours:times", BREAKABLE
    return CheckStep(
        name=name,
        expected_s=expected_s,
        limit_s=limit_s,
        call=call,
        run=run,
        shows=shows,
        settings=settings,
        second_try=second,
        dry=settings == {"runner": "v1"},
    )


STEPS = (
    CheckStep("probe", 8, 30, 1, f"{ROOM}.probe:probe", "card, versions, libraries, bandwidth of its memory", dry=True),
    CheckStep("operators", 30, 90, 1, f"{ROOM}.operators:operators",
         "vLLM's compiled operators and products against torch's, equal bits at M = 1 and more, microseconds",
         dry=True),
    CheckStep("sampler", 40, 120, 1, f"{ROOM}.drawing:sampler",
         "the fused draw against kernel_cpu; microseconds and share of the memory's speed", dry=True),
    CheckStep("exact_eager", 50, 150, 1, f"{ROOM}.ours:exact", "V1 without graphs: equal tokens alone, together,"
         " in chunks, with drafts", {"runner": "v1"}, dry=True),
    CheckStep("attention_flash", 25, 80, 1, f"{ROOM}.attention:attention",
         "FLASH_ATTN (FA3 on SM90): a row beside a prefill, rows that verify drafts: equal bits, or by how much",
         {"backend": "FLASH_ATTN"}),
    CheckStep("attention_triton", 25, 80, 1, f"{ROOM}.attention:attention", "TRITON_ATTN: the same",
         {"backend": "TRITON_ATTN"}, dry=True),
    CheckStep("attention_flashinfer", 5, 80, 1, f"{ROOM}.attention:attention",
         "FLASHINFER: the same, where it is installed", {"backend": "FLASHINFER"}),
    CheckStep("own_tests", 70, 150, 1, f"{ROOM}.own_tests:own_tests",
         "the tests of tests/gpu that need no demo model", dry=True),
    _ours("v1", 110, 220, 2, "V1 with graphs at `bits` (TRITON_ATTN): tokens, flips per"
          " million, ms a step and host time between passes at 8, 64, 256 samples, drafts off, missing, hitting",
          runner="v1"),
    CheckStep("stock", 50, 150, 2, f"{ROOM}.plain:plain", "stock vLLM stepped as v2_law, not batch-invariant:"
         " the same times, without and with logprobs", {"level": "law", "runner": "v2", "ahead": True}, EAGER,
         dry=True),
    CheckStep("stock_ships", 50, 150, 2, f"{ROOM}.plain_loop:loop", "stock vLLM as it ships: its own process,"
         " asynchronous scheduling", {"waits": False}, EAGER),
    _ours("v2_law", 80, 180, 2, "as v2 at `law`, the default on GPUs: vLLM's own kernels, steps ahead; flips counted,"
          " the speed", runner="v2", level="law"),
    _ours("v2", 100, 200, 2, "as v1, with vLLM's second model runner", runner="v2"),
    _ours("v2_law_waits", 80, 180, 3, "as v2_law, each step after the tokens of the one before", runner="v2",
          level="law", ahead=False),
    CheckStep("stock_waits", 45, 150, 3, f"{ROOM}.plain_loop:loop", "as stock_ships, without asynchronous scheduling",
         {"waits": True}, EAGER),
    CheckStep("stock_invariant", 50, 150, 3, f"{ROOM}.plain:plain", "as stock, batch-invariant: the cost of that alone",
         {"level": "bits", "runner": "v2", "ahead": True}, EAGER),
    _ours("v1_law", 80, 180, 3, "as v1 at `law`", runner="v1", level="law"),
    _ours("v1_flash", 90, 200, 3, "as v1, with FlashAttention 3, which `bits` refuses: its flips, and what it saves",
          runner="v1", level="law", forced="FLASH_ATTN"),
    _ours("v1_1.7B", 80, 180, 3, "as v1 on shapes of 1.7B, whose products vLLM has tuned", runner="v1", shape="1.7B"),
    _ours("v1_8B", 90, 200, 3, "times of shapes of 8B, with weights of vLLM's dummy loader", runner="v1", shape="8B"),
    CheckStep("stock_8B", 70, 180, 3, f"{ROOM}.plain:plain", "stock vLLM's times of shapes of 8B",
         {"level": "law", "shape": "8B"}, EAGER),
    CheckStep("weights", 50, 120, 3, f"{ROOM}.weights:weights", "new weights from a folder, and by CUDA IPC", dry=True),
    CheckStep("experts", 60, 150, 3, f"{ROOM}.experts:experts", "a mixture of experts at `bits`: equal tokens alone,"
         " together, in chunks, with drafts; new weights, and what the engine then holds", dry=True),
    CheckStep("fp8", 60, 150, 3, f"{ROOM}.fp8:fp8", "weights and KV in FP8 at `bits`: equal tokens alone, together, in"
         " chunks, with drafts; new weights, which the engine quantizes", dry=True),
    CheckStep("drafter", 60, 150, 3, f"{ROOM}.drafter:drafter", "vLLM's own draft model, V2, graphs, `bits`: equal"
         " tokens with its drafts, which share the samples' noise, and how many are right", second_try=EAGER, dry=True),
    CheckStep("kv_copy", 10, 40, 3, f"{ROOM}.kv_copy:kv_copy", "KV blocks to pinned memory and back, GB/s", dry=True),
    CheckStep("sleep", 30, 90, 3, f"{ROOM}.sleep:sleep", "memory given back and taken again", dry=True),
    CheckStep("pool", 45, 120, 3, f"{ROOM}.pool:pool", "KV to the pool and back: equal tokens, ms beside"
         " computing it again",
         dry=True),
)  # fmt: skip

CALLS = {"first": 1, "second": 2}
"""Numbers of the calls, by the name that selects all steps of a call."""

WARM_UP = CheckStep(
    "warm_up", 0, 300, 3, f"{ROOM}.probe:warm_up", "compiles beside the first steps what numba compiles"
)


def named(name: str) -> list[CheckStep]:
    """Returns the step of this name, or the steps of the call of this name. The list is empty if there is no
    such name.
    """
    return [step for step in STEPS if step.name == name or step.call == CALLS.get(name)]


def of(names: list[str]) -> list[CheckStep]:
    """Returns the named steps in the catalog's order, or all steps if no names are given."""
    chosen = [step for name in names for step in named(name)] if names else STEPS
    return [step for step in STEPS if step in chosen]
