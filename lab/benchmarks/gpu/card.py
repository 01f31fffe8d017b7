"""The name of the first GPU, read by the driver's library alone, so that torch is not imported."""

import ctypes


def card_name() -> str | None:
    """Returns the name of CUDA's device 0, or None where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    return None if cuda.cuDeviceGetName(name, len(name), device) else name.value.decode(errors="replace")
