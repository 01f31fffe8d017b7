"""What must be patched in other people's packages before an engine is built, each with the way out.

Called by launch.py, before it builds one.
"""


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
