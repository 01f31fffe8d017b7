"""Compiles the kernels that an engine runs in each step into numba's cache beside the code. Run by setup.sh."""

from tailrace.deployments.draft_index import group_index
from tailrace.deployments.vllm_exact import kernel_cpu

if __name__ == "__main__":
    kernel_cpu.warm_up()
    group_index.warm_up()
