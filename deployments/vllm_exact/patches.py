"""What must be patched in other people's packages for an engine, each with the way out. Called by launch.py."""


def make_llvmlite_scannable() -> None:
    """Lets vLLM build an engine where numba was imported before.

    Symptom (vLLM 0.32, CPU): "AttributeError: '_lib_fn_wrapper' object has no attribute 'get'". Its search for
    Triton kernels takes `vars()` of every object of every module, and llvmlite's library handle answers any
    attribute, `__dict__` included, with a function. The handle looks into this table first.
    Remove when `vllm.triton_utils.dispatcher` no longer calls `vars(value).get`.
    """
    import vllm
    from llvmlite.binding import ffi

    if vllm.__version__.startswith("0.32."):
        ffi.lib._fntab["__dict__"] = {}


def verify_drafts_only(engine) -> None:
    """A chunk that continues with all its KV computes one token in its first step, not that and a dummy draft.

    Symptom (vLLM 0.32): with speculation on, a new request whose context is computed but for its last token is padded
    with `num_speculative_tokens` draft tokens of -1, so that a CUDA graph of uniform decodes fits; ours never are
    uniform. With 16 draft tokens that was 38 ms a hand-over on a CPU core. vLLM does not pad when the number of draft
    tokens follows the batch's size, so it does, and is the same for all; the option for that would give up full graphs.
    Remove when the padding has a switch. `engine`: vLLM's LLMEngine, with speculation.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (scheduler.max_num_running_reqs + 1)
