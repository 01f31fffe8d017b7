"""The vLLM worker whose tokens are drawn exactly. Loaded by vLLM itself, by dotted path (`worker_cls`).

Invariant: whatever model runner vLLM builds, every token comes from ExactSampler or ExactRejectionSampler.
Only the class of this machine's platform exists here, because importing the other one's base can fail.
"""

from vllm.platforms import current_platform

from deployments.engine.sampler import ExactRejectionSampler, ExactSampler


class ExactWorker:
    """Mixin before a vLLM worker class."""

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        runner.sampler = ExactSampler(runner, self.kernel())
        if hasattr(runner, "rejection_sampler"):  # only built when something drafts
            runner.rejection_sampler = ExactRejectionSampler(runner.sampler)

    def take_record(self, req_id: str, start: int, count: int):
        """`Records.take` by `collective_rpc`: (logprobs, raw_logprobs, drafted, accepted) of one request."""
        return self.model_runner.sampler.records.take(req_id, start, count)


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class ExactCPUWorker(ExactWorker, CPUWorker):
        """vLLM's CPU worker, with the numba kernel."""

        def kernel(self):
            from deployments.engine import kernel_cpu

            return kernel_cpu

else:
    from vllm.v1.worker.gpu_worker import Worker

    class ExactGPUWorker(ExactWorker, Worker):
        """vLLM's GPU worker, with the torch kernel."""

        def kernel(self):
            from deployments.engine import kernel_gpu

            return kernel_gpu
