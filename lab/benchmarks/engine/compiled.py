"""Compilation of the fused sampling kernel for GPUs, without a GPU: python -m tailrace.lab.benchmarks.engine.compiled.

Prints three numbers by launch and compute capability. They are the bytes of machine code, the PTX instructions with a
constant of the integer units, and those of them that are fused with another operation. The last number must be 0: see
`exp64` in fused/noise.py.
"""

import json
import re

CAPABILITIES = 80, 90, 100
UNIT_CONSTANTS = "0d3E21EED8EFF8D898", "0d3F81111111111111", "0d3FC5555555555555"  # 1/12!, 1/120, 1/6


def signatures(dtype: str) -> dict[str, dict[str, str]]:
    """Returns the types of both launches' arguments for logits of this dtype."""
    given = {"logits": f"*{dtype}", "stride": "i64", "vocab": "i32", "keys": "*i64", "positions": "*i64"}
    given |= {"heat": "*fp64", "plan": "*i32"}
    left = {"ints": "*i32", "floats": "*fp64", "counts": "*i32"}
    buffer = {"kept": f"*{dtype}", "kept_at": "*i32", "room_for": "i32"}
    results = {"tokens": "*i32", "values": "*fp32"}
    return {"scan": given | left, "settle": given | {"filters": "*fp64", "parts": "i32"} | left | buffer | results}


def measure(vocab: int = 151_936, dtype: str = "bf16") -> dict:
    """Returns the figures of each launch for each capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tailrace.deployments.vllm_exact.fused import kernel

    parts = triton.next_power_of_2(-(-vocab // kernel.SPAN))
    fixed = {
        "scan": {"BLOCK": kernel.BLOCK, "SPAN": kernel.SPAN},
        "settle": {"PARTS": parts, "BLOCK": kernel.BLOCK},
    }
    if parts == 1:
        fixed["settle"]["parts"] = 1  # Triton makes a constant of an integer argument that is 1
    found = {}
    for name, types in signatures(dtype).items():
        source = ASTSource(getattr(kernel, name), types | dict.fromkeys(fixed[name], "constexpr"), fixed[name])
        for capability in CAPABILITIES:
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.LAUNCH)
            found[f"{name} sm_{capability}"] = {"bytes": len(made.asm["cubin"])} | _units(made.asm["ptx"])
    return found


def _units(ptx: str) -> dict[str, int]:
    lines = [line for line in ptx.splitlines() if any(constant in line for constant in UNIT_CONSTANTS)]
    fused = [line for line in lines if re.search(r"\bfma\.", line)]
    return {"constants": len(lines), "fused_units": len(fused)}


if __name__ == "__main__":
    print(json.dumps(measure()))
