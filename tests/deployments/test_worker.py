"""The worker's methods for RPCs, on two ranks behind a stand-in for vLLM's executor of several processes."""

from collections import deque
from types import SimpleNamespace

import pytest
from stand_ins import loaded_with

import tailrace.deployments.features.encoder
import tailrace.deployments.staging.held
import tailrace.deployments.staging.received
import tailrace.deployments.vllm_exact.engine_config
import tailrace.deployments.vllm_exact.sampler
import tailrace.deployments.vllm_exact.windows  # noqa: F401 - before the worker's own import, which is undone
from tailrace.deployments.engine import engine_weights
from tailrace.deployments.engine.engine_weights import EngineWeights
from tailrace.deployments.messages.transfer import Transfer, TransferPhase

STAND_INS = {
    "vllm.config": {"set_current_vllm_config": None},
    "vllm.distributed.kv_transfer": {"get_kv_transfer_group": None, "has_kv_transfer_group": lambda: False},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    "vllm.v1.worker.cpu_worker": {"CPUWorker": object},
    "tailrace.deployments.vllm_exact.lora": {},
}

worker = loaded_with("tailrace.deployments.vllm_exact.worker", STAND_INS)


class Rank(worker.ExactCPUWorker):
    """A rank of two, whose transfer engine raises."""

    def __init__(self, rank: int):
        self.rank, self.parallel_config = rank, SimpleNamespace(world_size=2)
        self._received = worker.ReceivedWeights()

    def weights_refusal(self, folder: str) -> None:
        return None

    def _receive(self, info: dict) -> None:
        raise KeyError(info["name"])


class Executor:
    """vLLM's engine, whose ranks answer as in `MultiprocExecutor`: each into a queue, which is read up to a failure."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="/model"))
        self._ranks = [(Rank(rank), deque()) for rank in range(2)]

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        for rank, answers in self._ranks:
            try:
                answers.append((True, getattr(rank, method)(*args)))
            except Exception as error:  # noqa: BLE001 - as vLLM's worker process
                answers.append((False, str(error)))
        found = []
        for _, answers in self._ranks:
            succeeded, answer = answers.popleft()
            if not succeeded:
                raise RuntimeError(f"Worker failed with error '{answer}'")
            found.append(answer)
        return found


ONE_RANK = "^weights are read back on engines of one rank alone; set tensor_parallel to 1$"


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (EngineWeights.read_back, ONE_RANK),
        (EngineWeights.fall_asleep, ONE_RANK),
        (lambda one: one.transfer(Transfer(TransferPhase.PART, {"name": "a"})), "^KeyError: 'a'$"),
        (lambda one: one.transfer(Transfer(TransferPhase.FINISH, version=4)), "^weights 4: no tensor was received$"),
    ],
    ids=["check_weights", "sleep", "part of a transfer", "end of a transfer"],
)
def test_a_refusal_of_ranks_is_one_and_leaves_no_answer_to_the_next_call(monkeypatch, refused, words):
    monkeypatch.setattr(engine_weights, "weights_digest", lambda folder: "d0")
    engine = Executor()
    weights = EngineWeights(engine, 3)
    with pytest.raises(ValueError, match=words):
        refused(weights)
    assert engine.collective_rpc("weights_refusal", ("/model",)) == [None, None] and weights.asleep == ()
    assert weights.transfer(Transfer(TransferPhase.START)) == ""


@pytest.mark.parametrize("fails", [False, True])
def test_no_rank_keeps_what_it_received_after_the_end_of_a_transfer(monkeypatch, fails):
    """Each rank but the first kept a whole model in host memory, until the next transfer began."""
    staged = []

    def stage(received, *given) -> str:
        staged.append((sorted(received.tensors), *given))
        if fails:
            raise ValueError("weights 4: no room")
        return "memory:app/4/0123456789abcdef"

    monkeypatch.setattr(worker.ReceivedWeights, "stage", stage)
    ranks = [Rank(rank) for rank in range(2)]
    for rank in ranks:
        rank._received.tensors = {"a": object()}
    end = Transfer(TransferPhase.FINISH, version=4, served=(3, "d"), service="app")
    answers = [rank.attempt("transfer_weights", end) for rank in ranks]
    assert answers == [(None, "weights 4: no room") if fails else ("memory:app/4/0123456789abcdef", None), ("", None)]
    assert staged == [(["a"], "app", 4, (3, "d"))] and [rank._received.tensors for rank in ranks] == [{}, {}]


GPU = STAND_INS | {
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
    "vllm.v1.worker.gpu_worker": {"Worker": object},
}


def test_a_gpu_whose_memory_another_process_has_refuses_to_wake():
    """An exception of one of several ranks leaves the others' answers to the next call."""

    class GpuRank(loaded_with("tailrace.deployments.vllm_exact.worker", GPU).ExactGPUWorker):
        def wake_up(self, tags: list[str]) -> None:
            raise RuntimeError(f"CUDA Error: out of memory for {tags}")

    reason = "the memory of the {0} is not to be had: RuntimeError: CUDA Error: out of memory for ['{0}']"
    for tag in ("weights", "kv_cache"):
        assert GpuRank().attempt("wake", tag) == (None, reason.format(tag))


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("has_further", [False, True])
def test_a_drafter_whose_memory_slept_is_loaded_also_where_the_trainer_has_no_layers_of_it(
    monkeypatch, lost, has_further
):
    """Multi-token prediction went on with what was in the memory: no draft was right after the first sleep."""
    loads = []
    held = {"model.layers.0.weight": None} | ({"model.layers.2.weight": None} if has_further else {})
    monkeypatch.setattr(worker, "tensors_of", lambda folder: held)
    monkeypatch.setattr(worker, "load_drafter", lambda config, model, *given: loads.append(given))
    rank = Rank(0)
    rank._proposer, rank._drafter_lost = SimpleNamespace(model="drafter"), lost
    rank.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method="mtp"))
    rank.model_config = SimpleNamespace(model="/model", hf_text_config=SimpleNamespace(num_hidden_layers=2))
    rank._load_drafter("/w1")
    if has_further or not lost:
        assert loads == ([("/w1",)] if has_further else [])
    else:
        ((folder, wanted),) = loads
        names = "model.layers.1.weight", "model.layers.2.weight", "mtp.fc.weight", "model.embed_tokens.weight"
        assert folder == "/model" and list(map(wanted, names)) == [False, True, True, False]
