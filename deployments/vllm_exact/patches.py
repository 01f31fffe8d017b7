"""Patches of other packages that an engine needs, each with the condition for its removal.

Called by launch.py, and in each worker by lora.py; `set_proposed` also by the stepper.
"""


def make_llvmlite_scannable() -> None:
    """Lets vLLM build an engine where numba was imported before.

    Symptom (vLLM 0.32, CPU): "AttributeError: '_lib_fn_wrapper' object has no attribute 'get'".
    vLLM's search for Triton kernels takes `vars()` of every object of every module.
    llvmlite's library handle returns a function for any attribute, `__dict__` included.
    The handle reads this table first.
    Remove when `vllm.triton_utils.dispatcher` no longer calls `vars(value).get`.
    """
    import vllm
    from llvmlite.binding import ffi

    if vllm.__version__.startswith("0.32."):
        ffi.lib._fntab["__dict__"] = {}


def verify_drafts_only(engine, proposes: bool = False) -> None:
    """Removes dummy drafts: a chunk that continues with all its KV computes one token in its first step.

    Symptom (vLLM 0.32): with speculation on, vLLM pads a new request whose context is computed except its last token.
    It adds `num_speculative_tokens` draft tokens of -1, so that a CUDA graph of uniform decodes fits.
    Tailrace's decodes are never uniform. With 16 draft tokens the padding took 38 ms a hand-over on a CPU core.
    vLLM does not pad when the number of draft tokens follows the batch's size.
    This patch sets a table by batch size with equal entries. vLLM's option for it would give up full graphs.
    Remove when the padding has a switch. `engine`: vLLM's LLMEngine, with speculation.

    It also leaves out a pass over all requests after each step that would give them the drafts of `NoDrafts`: none. The
    scheduler has dropped the drafts of the step before. An asynchronous scheduler would put places for drafts to come
    into the next step, as many as the table says; ours never come from the device, so it says 0.

    `proposes`: the engine has a drafter of vLLM's, whose drafts come in that pass, as many as `set_proposed` says.
    """
    core = engine.engine_core.engine_core
    core.check_for_draft_tokens = proposes
    set_proposed(engine, 0 if proposes or core.async_scheduling else core.scheduler.num_spec_tokens)


def set_proposed(engine, tokens: int) -> None:
    """Sets how many tokens vLLM's own drafter proposes for each request, from the next step on."""
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.dynamic_sd_lookup = [tokens] * (scheduler.max_num_running_reqs + 1)


def multiply_by_slot(wrapper: str) -> None:
    """Makes vLLM multiply by adapters on a CPU with the class of this dotted path.

    Symptom (vLLM 0.32, CPU): in a batch with adapters, requests without one get the last slot's adapter.
    Its operators use -1, which marks rows without an adapter, as an index.
    Remove when `vllm.lora.ops.torch_ops.lora_ops` leaves rows of index -1 as they are.
    """
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and vllm.__version__.startswith("0.32."):
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: wrapper)
