"""The fused kernel, compiled: whatever ran before in this process may have loaded it for the interpreter."""

import pytest

from tailrace.lab.benchmarks.engine import interpreted


@pytest.fixture(scope="session")
def fused():
    """The module fused.kernel."""
    interpreted.forget()
    from tailrace.deployments.vllm_exact.fused import kernel

    return kernel
