"""A service in this process: a client's calls, answered by a Hugging Face model that draws by sample keys."""

import threading
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace.app.train.record.checksum import weights_checksum
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.rollout import GroupResult, SampleResult, Segment, WeightsLoaded
from tailrace.deployments.messages.status import ServiceSnapshot
from tailrace.deployments.vllm_exact.weight_loading import weights_digest
from tailrace.policies.protocol.actions import SampleEnd


class StandIn:
    """`model`: folder of the model that the service is started with."""

    def __init__(self, model: Path):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.eos = self.model.config.eos_token_id
        self.version, self.digest = 0, ""
        self.batches, self.updates, self.cancelled = [], [], []
        self.lock = threading.Lock()  # one sample at a time, and no update within one

    def status_blocking(self):
        return ServiceSnapshot(
            waiting=0, running=0, batches=(), replicas=(), observed_s=0.0, waits_for=None, policies={},
            weights_version=self.version,
        )  # fmt: skip

    def cancel_blocking(self, batch_id: str) -> bool:
        self.cancelled.append(batch_id)
        return True

    def update_weights_blocking(self, version: int, source: str, digest: str = "") -> WeightsLoaded:
        tensors = {
            name: value for path in Path(source).glob("*.safetensors") for name, value in load_file(path).items()
        }
        assert tensors.keys() == dict(self.model.named_parameters()).keys(), "the set that a service compares"
        with self.lock:
            self.model.load_state_dict(tensors, strict=False)
            self.version, self.digest = version, weights_digest(source)
            self.updates.append((version, source))
        return WeightsLoaded(version=version, digest=self.digest, replicas=("one",))

    def send_weights_blocking(self, version: int, tensors) -> WeightsLoaded:
        sent = {name: value.clone() for name, value in tensors}
        assert sent.keys() == dict(self.model.named_parameters()).keys(), "the set that a service compares"
        with self.lock:
            self.model.load_state_dict(sent, strict=False)
            self.version, self.digest = version, weights_checksum(self.model)
            self.updates.append((version, "memory"))
        return WeightsLoaded(version=version, digest=self.digest, replicas=("one",))

    def rollout_blocking(self, batch):
        assert batch.weights_version in (None, self.version)
        self.batches.append(batch)
        for group in reversed(batch.groups):  # a service gives groups in any order
            if batch.batch_id in self.cancelled:
                return
            samples = []
            for index in range(group.samples):
                with self.lock:
                    samples.append(self._sample(batch, group, index))
            yield GroupResult(
                batch_id=batch.batch_id,
                prompt_id=group.prompt_id,
                prompt_token_ids=group.token_ids,
                samples=tuple(samples),
                prompt_key="key",
                step=batch.step,
            )

    @torch.no_grad()
    def _sample(self, batch, group, index: int) -> SampleResult:
        key = sample_key(batch.seed, batch.step, group.prompt_id, index)
        chance = torch.Generator().manual_seed(key % (1 << 63))
        tokens, logprobs = [], []
        while len(tokens) < group.max_tokens and tokens[-1:] != [self.eos]:
            logits = self.model(torch.tensor([[*group.token_ids, *tokens]])).logits[0, -1].double()
            if group.sampling.temperature == 0:
                token, law = int(logits.argmax()), torch.log_softmax(logits, -1)
            else:
                law = torch.log_softmax(logits / group.sampling.temperature, -1)
                token = int(torch.multinomial(law.exp(), 1, generator=chance))
            tokens.append(token)
            logprobs.append(float(law[token]))
        return SampleResult(
            sample_index=index,
            token_ids=tuple(tokens),
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            logprobs=tuple(logprobs),
            raw_logprobs=tuple(logprobs),
            finish_reason=SampleEnd.STOP if tokens[-1] == self.eos else SampleEnd.LENGTH,
            segments=(
                Segment(
                    weights_version=self.version, weights_digest=self.digest, replica_id="one", start=0, end=len(tokens)
                ),
            ),
        )

    def record_rewards_blocking(self, group, rewards) -> None:
        pass
