"""The vLLM worker with exact sampling. Loaded by vLLM itself, by dotted path (`worker_cls`).

Invariant: with any model runner of vLLM, every token comes from ExactSampler or ExactRejectionSampler. Only the class
of this machine's platform exists here, because importing the other one's base can fail.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from tailrace.deployments.features import encoder
from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.messages.chunk import KV_CACHE, WEIGHTS
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.transfer import Transfer, TransferPhase
from tailrace.deployments.staging.adapter_folder import misfit
from tailrace.deployments.staging.given_back import give_back, trim
from tailrace.deployments.staging.held import HeldWeights, is_packed, quantized_checksums
from tailrace.deployments.staging.received import ReceivedWeights
from tailrace.deployments.vllm_exact import lora, windows
from tailrace.deployments.vllm_exact.engine_config import ROUTED_EXPERTS
from tailrace.deployments.vllm_exact.sampler import ExactSampler
from tailrace.deployments.vllm_exact.weight_loading import (
    Tensors,
    load_drafter,
    load_in_place,
    predicts_further,
    read_tensors,
    refusal,
    tensors_of,
)


class ExactWorker:
    """A mixin, placed before a vLLM worker class."""

    def load_model(self, *args, **kwargs) -> None:
        if self.vllm_config.lora_config is not None:
            lora.prepare(self.model_runner)
        if self._keeps_routes:
            from tailrace.deployments.vllm_exact import expert_routes  # it imports all of vLLM's experts

            expert_routes.check_fits(self.vllm_config)
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        runner.sampler = self.sampler_of(runner)
        if getattr(runner, "rejection_sampler", None) is not None:  # only built when something drafts
            runner.rejection_sampler = runner.sampler.verifier()
        self._proposer = getattr(runner, "speculator" if self.use_v2_model_runner else "drafter", None)
        if self._proposer is not None:
            runner.sampler.share_noise(self._proposer)
        if self.model_config.is_multimodal_model:
            encoder.encode_alone(runner)
        self._received, self._drafter_lost = ReceivedWeights(), False
        self._tensors: Tensors = tensors_of(self.model_config.model)  # a trainer may write into that folder later

    def execute_model(self, scheduler_output):
        """Runs a step. V2 takes no drafts from the scheduler; it reads them where those of its speculator would be."""
        if self.use_v2_model_runner and scheduler_output.scheduled_spec_decode_tokens:
            self.model_runner.sampler.take_drafts(scheduler_output.scheduled_spec_decode_tokens)
        return super().execute_model(scheduler_output)

    def propose_nothing(self) -> None:
        """Makes V2 verify only the scheduler's drafts, for an RPC."""
        self.model_runner.sampler.propose_nothing(self.model_runner.speculator)

    def features_refusal(self, features: PromptFeatures, token_ids: list[int], new: list[int]) -> str | None:
        """Calls `encoder.features_refusal` for an RPC."""
        with set_current_vllm_config(self.vllm_config):
            return encoder.features_refusal(self.model_runner, features, token_ids, new)

    def attempt(self, method: str, *args) -> tuple[Any, str | None]:
        """Calls a method for an RPC. Returns its answer, and the text of its ValueError, or None.

        With several ranks, vLLM raises at the first rank's error: it leaves the answers of the others to the next RPC.
        """
        try:
            return getattr(self, method)(*args), None
        except ValueError as error:
            return None, str(error)

    def weights_refusal(self, folder: str) -> str | None:
        """Returns in one line why this folder's weights cannot replace the model's, or None."""
        return refusal(folder, self._tensors, self._layers)

    @property
    def _layers(self) -> int:
        return self.model_config.hf_text_config.num_hidden_layers

    def load_weights_from(self, folder: str) -> None:
        """Loads a folder's safetensors, not refused, into the running model; no request may be in flight.

        Raises RuntimeError when it fails half-way.
        """
        with set_current_vllm_config(self.vllm_config):  # as vLLM's own `Worker.reload_weights`
            lora.keep_adapters(self.model_runner, partial(load_in_place, self.model_runner, folder))
            self._load_drafter(folder)
        self._drafter_lost = False

    def _load_drafter(self, folder: str) -> None:
        """Loads the drafter's weights, after a load of this folder, unless it keeps those that it has."""
        settings, drafter = self.vllm_config.speculative_config, getattr(self._proposer, "model", None)
        further = partial(predicts_further, layers=self._layers)
        if drafter is None:
            return
        if settings.method == "mtp" and any(map(further, tensors_of(folder))):
            load_drafter(self.vllm_config, drafter, folder)
        elif settings.method == "mtp" and self._drafter_lost:
            # Its other layers are the model's, which has newer weights than this folder.
            load_drafter(self.vllm_config, drafter, self.model_config.model, further)
        elif self._drafter_lost:
            load_drafter(self.vllm_config, drafter, settings.draft_model_config.model)

    def hold_adapter(self, number: int, folder: str) -> str | None:
        """Loads a folder's adapter under a number. Returns why it must then be dropped, or None."""
        reason = misfit(folder, {name: shape for name, (shape, _) in self._tensors.items()})
        return lora.hold(self.model_runner, number, folder) if reason is None else reason

    def drop_adapter(self, number: int) -> None:
        """Drops the adapter of a number, if it is here; no request uses it."""
        self.model_runner.lora_manager.remove_adapter(number)

    def held_weights(self) -> HeldWeights:
        """Returns the weights that this rank computes with. Raises ValueError if it holds only a part of each, or holds
        them in another form.
        """
        if self.parallel_config.world_size > 1:
            raise ValueError("weights are read back on engines of one rank alone; set tensor_parallel to 1")
        return HeldWeights(self.model_runner.get_model(), self._shapes)

    @property
    def _is_quantized(self) -> bool:
        return self.model_config.is_quantized or self.model_config.quantization is not None

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the saved tensors that the model holds."""
        held = {name: shape for name, (shape, _) in self._tensors.items()}
        return {name: shape for name, shape in held.items() if not predicts_further(name, self._layers)}

    def weight_checksums(self) -> dict[str, str]:
        """Returns checksums of the weights held, by saved name; of quantized ones by vLLM's. Raises ValueError, one
        line.
        """
        return self._read(quantized_checksums, HeldWeights.checksums)

    def unlike_weights(self, folder: str) -> list[str] | None:
        """Returns the names of held tensors that differ from those of a folder; None if they are quantized, and have
        other values. Raises ValueError, one line.
        """
        return self._read(lambda _model: None, lambda held: held.unlike(read_tensors(folder)))

    def _read(self, quantized: Callable, plain: Callable):
        held = self.held_weights()
        return quantized(self.model_runner.get_model()) if self._is_quantized else plain(held)

    def transfer_weights(self, transfer: Transfer) -> str:
        """Runs one phase of a transfer. Returns the source that the first rank has staged, or an empty text.

        Received tensors are kept apart: the model changes by `load_weights_from` alone. Raises ValueError, one line.
        """
        try:
            return self._transfer(transfer)
        except ValueError:
            raise
        except Exception as error:  # after any error the model is as it was
            raise ValueError(one_line(error)) from error

    def _transfer(self, transfer: Transfer) -> str:
        match transfer.phase:
            case TransferPhase.INIT:
                self.init_weight_transfer_engine(transfer.info)
            case TransferPhase.START | TransferPhase.DROP:
                self._received = ReceivedWeights()
            case TransferPhase.PART:
                self._receive(transfer.info)
            case TransferPhase.SHUTDOWN:
                self.shutdown_weight_transfer_engine()
            case TransferPhase.FINISH:  # every rank has received all tensors; the first one writes them
                received, self._received = self._received, ReceivedWeights()
                return received.stage(transfer.service, transfer.version, transfer.served) if self.rank == 0 else ""
        return ""

    def _receive(self, info: dict | list) -> None:
        self._check_weight_transfer_engine()
        engine = self.weight_transfer_engine
        engine.set_weight_update_target(self._received, self.model_config)
        try:
            with set_current_vllm_config(self.vllm_config):
                engine.update_weights(info[self.rank] if isinstance(info, list) else info)
        finally:
            engine.reset_weight_update_target()

    @property
    def _keeps_routes(self) -> bool:
        return ROUTED_EXPERTS in self.vllm_config.additional_config

    def initialize_from_config(self, kv_cache_config) -> None:
        super().initialize_from_config(kv_cache_config)
        if self._keeps_routes:
            from tailrace.deployments.vllm_exact.expert_routes import ExpertRoutes

            self._routes = ExpertRoutes(self.vllm_config, self.model_runner.get_model(), kv_cache_config)
            if has_kv_transfer_group():
                get_kv_transfer_group().keep_beside(self._routes.blocks)

    def routed_experts(self, req_id: str, start: int, end: int):
        """Calls `ExpertRoutes.read` for an RPC, for a request of the last step; None if it was in no step."""
        runner = self.model_runner
        if self.use_v2_model_runner:
            row = runner.req_states.req_id_to_index.get(req_id)
            return None if row is None else self._routes.read(runner.block_tables.block_tables[0].gpu[row], start, end)
        request = runner.requests.get(req_id)
        return None if request is None else self._routes.read(request.block_ids[0], start, end)

    def take_record(self, req_id: str, start: int, count: int):
        """Calls `LogprobStore.take` for an RPC: the DrawRecord of one request."""
        return self.model_runner.sampler.records.take(req_id, start, count)

    def echo(self, mark: str) -> str:
        """Returns `mark`, for an RPC: answers before it are to earlier ones."""
        return mark

    def begin_again(self) -> list[str]:
        """Discards the half of a step that raised, for an RPC. Returns the requests that the runner still has."""
        runner = self.model_runner
        runner.execute_model_state = runner.kv_connector_output = None
        if self.use_v2_model_runner:
            return list(runner.req_states.req_id_to_index)
        return list({**runner.requests, **runner.input_batch.req_id_to_index})

    def take_closed(self) -> dict[str, int]:
        """Calls `ExactSampler.take_closed` for an RPC."""
        return self.model_runner.sampler.take_closed()


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class ExactCPUWorker(ExactWorker, CPUWorker):
        """vLLM's CPU worker, with the numba kernel."""

        def sampler_of(self, runner) -> ExactSampler:
            from tailrace.deployments.vllm_exact import kernel_cpu

            return ExactSampler(runner, kernel_cpu)

        def fall_asleep(self) -> None:
            """Gives back the memory of weights and KV; no request may be in flight. Raises ValueError before that.

            vLLM's sleep mode supports only GPUs. Here tensors keep their addresses, and a load makes the packed copies
            again.
            """
            held, model = self.held_weights(), self.model_runner.get_model()
            saved = [getattr(module, kind) for module, kind, _ in map(held.module_of, self._shapes)]
            packed = [module for module in model.modules() if is_packed(module)]
            if not {id(module.weight) for module in packed} <= set(map(id, saved)):
                raise ValueError("a packed weight of the model is in no file, so a load would not bring it back")
            for module in packed:
                del module.cpu_linear
            give_back([*saved, *self.model_runner.kv_caches])
            trim()

        def wake(self, tag: str) -> None:
            """Does nothing: pages return as they are written, weights by a load."""

    class WindowedCPUWorker(ExactCPUWorker):
        """The worker of `exactness: bits` in bfloat16: each pass is canonical, see windows.py."""

        def load_model(self, *args, **kwargs) -> None:
            windows.check_fits(self.vllm_config)
            super().load_model(*args, **kwargs)
            self._windows = windows.Windows()
            self._windows.wrap(self.model_runner.get_model())

        def load_weights_from(self, folder: str) -> None:
            super().load_weights_from(folder)
            self._windows.wrap(self.model_runner.get_model())

        def initialize_from_config(self, kv_cache_config) -> None:
            super().initialize_from_config(kv_cache_config)
            for group in self.model_runner._attn_group_iterator():
                windows.attend_in_pieces(group.get_metadata_builder())

else:
    from vllm.v1.worker.gpu_worker import Worker

    class ExactGPUWorker(ExactWorker, Worker):
        """vLLM's GPU worker, with the fused kernel."""

        def sampler_of(self, runner) -> ExactSampler:
            if self.use_v2_model_runner:
                from tailrace.deployments.vllm_exact.fused.sampler_v2 import SamplerV2

                return SamplerV2(runner)
            from tailrace.deployments.vllm_exact.fused.device_sampler import DeviceSampler

            return DeviceSampler(runner)

        def fall_asleep(self) -> None:
            """Gives back the memory of weights and KV, by vLLM's sleep mode. Raises ValueError before that."""
            if not self.model_config.enable_sleep_mode:
                raise ValueError("give the engine vllm_args: {enable_sleep_mode: true}")
            if self.vllm_config.kv_transfer_config is not None:
                raise ValueError(
                    "the pool's client knows the addresses of the KV; an engine with a pool keeps its memory"
                )
            self.sleep(level=2)
            self._drafter_lost = True

        def wake(self, tag: str) -> None:
            """Allocates the memory of the weights, which a load then fills, or of the KV. Raises ValueError, one line,
            if another process has it; a further call allocates the rest.
            """
            try:
                self.wake_up([{WEIGHTS: "weights", KV_CACHE: "kv_cache"}[tag]])
            except RuntimeError as error:
                raise ValueError(f"the memory of the {tag} is not to be had: {one_line(error)}") from error
