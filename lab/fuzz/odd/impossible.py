"""Requests that no service can run, as batches and as calls of sessions, by a driver that has good ones, too.

Law: each is refused in one line, at once while the service is sound, and leaves nothing there. Other checks hold as
ever, for the driver's good batches under the same names and for other drivers' batches. Called by `drivers`.
"""

import asyncio
from math import inf, nan
from random import Random

from ray.exceptions import RayError, RayTaskError

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import RolloutRejected, WeightsRejected
from tailrace.deployments.messages.rollout import BatchSettings, PromptGroup, RolloutBatch, SamplingParams
from tailrace.deployments.messages.session import SampleRequest
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.token_law import VOCABULARY

REFUSED_S = 2.0
"""Maximum seconds to a refusal by a service without a fault so far; a client's call has a latency of 0 here."""

HALF = "half \ud800 of a pair"

OF_GROUP = (
    {"token_ids": ()}, {"token_ids": (1,) * 512}, {"token_ids": (1,) * 100_000}, {"token_ids": (VOCABULARY,)},
    {"token_ids": (1, -1)}, {"token_ids": (2**31,)}, {"token_ids": (2**63,)}, {"token_ids": ("x",)},
    {"token_ids": (1.5,)}, {"token_ids": None}, {"token_ids": None, "text": "words"}, {"token_ids": None, "text": ""},
    {"token_ids": None, "text": HALF}, {"text": "1"}, {"token_ids": None, "text": str(VOCABULARY)},
    {"prompt_id": ""}, {"prompt_id": HALF}, {"prompt_id": None}, {"samples": 0}, {"samples": -1}, {"samples": 2**63},
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": nan}, {"max_tokens": "many"}, {"adapter": "unknown"},
    {"adapter": HALF}, {"sampling": 7}, {"sampling": "greedy"}, {"forced_token_ids": ((VOCABULARY,),)},
)  # fmt: skip

OF_SAMPLING = (
    {"temperature": nan}, {"temperature": inf}, {"temperature": 1e39}, {"temperature": -0.1}, {"top_p": nan},
    {"top_p": 0.0}, {"top_p": 1.5}, {"top_p": -inf}, {"top_k": -2}, {"top_k": 0.5}, {"top_k": "all"}, {"min_p": nan},
    {"min_p": 1.1}, {"stop_token_ids": (VOCABULARY,)}, {"stop_token_ids": (-1,)}, {"stop_token_ids": (2**63,)},
    {"stop": ("",)}, {"stop": ("x" * 100_000,)}, {"stop": (HALF,)}, {"stop": ("x",) * 1000}, {"min_tokens": -1},
    {"min_tokens": 2**31}, {"bad_words": (" ",)}, {"bad_words": (HALF,)}, {"bad_words": ("words",)},
    {"allowed_token_ids": ()}, {"allowed_token_ids": (VOCABULARY,)}, {"allowed_token_ids": (5,), "bad_words": ("5",)},
    {"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 1}, {"logit_bias": ((VOCABULARY, 1.0),)},
    {"logit_bias": ((1, nan),)}, {"logit_bias": ((1, inf),)}, {"logit_bias": ((1, 101.0),)},
    {"logit_bias": ((-1, 1.0),)}, {"repetition_penalty": 0.0}, {"repetition_penalty": nan},
    {"repetition_penalty": 1e-39}, {"presence_penalty": inf}, {"frequency_penalty": nan}, {"top_logprobs": 10**6},
    {"prompt_logprobs": -1}, {"structured_outputs": {}}, {"sampling_mask": True},
    {"structured_outputs": {"regex": "a", "grammar": "b"}},
)  # fmt: skip

GOOD = PromptGroup(prompt_id="odd", token_ids=(1, 2), samples=1, max_tokens=4)


class ImpossibleAsks:
    """The impossible requests of one driver. A breach of the law is a defect of the run. `rng`: used here alone."""

    def __init__(self, cluster: SimulatedCluster, client: RolloutClient, rng: Random):
        self._cluster, self._client, self._rng = cluster, client, rng
        self._now = asyncio.get_running_loop().time

    async def before(self, batch: RolloutBatch) -> None:
        """Sends requests under the name of the driver's next batch."""
        for _ in range(self._rng.randint(0, 2)):
            await self._ask(batch, batch.batch_id)

    async def meanwhile(self, batch: RolloutBatch) -> None:
        """Sends requests under another name while a batch is in flight."""
        while True:
            await asyncio.sleep(self._rng.choice((0.0, 0.5, 3.0)))
            await self._ask(batch, f"{batch.batch_id}-odd")
            await asyncio.sleep(5.0)

    async def _ask(self, batch: RolloutBatch, name: str) -> None:
        bad = self._rng.choice(OF_GROUP)
        if self._rng.random() < 0.6:
            bad = {"sampling": SamplingParams().model_copy(update=self._rng.choice(OF_SAMPLING))}
        group = GOOD.model_copy(update=bad)
        way = self._rng.choice((self._as_batch, self._as_sample, self._as_stream))
        began_s, cluster, was_open = self._now(), self._cluster, self._is_open(name)
        try:
            await way(batch.model_copy(update={"batch_id": name}), group)
        except RolloutRejected as refused:
            problem = "is no line" if not str(refused) or "\n" in str(refused) else None
            late_s = self._now() - began_s
            if late_s > REFUSED_S and not cluster.culprits.excuses:
                problem = f"came after {late_s:.1f} s"
            if self._is_open(name) and not was_open:  # a driver that has vanished may have left its own
                problem = "has left a session"
            if problem is not None:
                cluster.defects.append(f"the refusal of {bad} by {way.__name__} {problem}: {refused}")
        except RayTaskError as raised:
            cluster.defects.append(f"{bad} by {way.__name__} made the coordinator raise {raised.cause!r}")
        except (RayError, WeightsRejected):  # the service is in trouble
            return
        else:
            cluster.defects.append(f"{bad} was taken by {way.__name__}")

    def _is_open(self, name: str) -> bool:
        """Returns whether there is a session of this name."""
        coordinator = self._cluster.coordinator
        return coordinator is not None and name in coordinator.rollouts.sessions.loads()

    async def _as_batch(self, batch: RolloutBatch, group: PromptGroup) -> None:
        groups = [*batch.groups, group]
        self._rng.shuffle(groups)
        async for _ in self._client.rollout(batch.model_copy(update={"groups": tuple(groups)})):
            pass

    def _request(self, batch: RolloutBatch, group: PromptGroup) -> tuple[BatchSettings, SampleRequest]:
        settings = BatchSettings(
            batch_id=batch.batch_id, seed=batch.seed, step=batch.step, priority=batch.priority, share=batch.share
        )
        request = SampleRequest(group=GOOD).model_copy(update={"group": group})
        return settings, request

    async def _as_sample(self, batch: RolloutBatch, group: PromptGroup) -> None:
        await self._client.samples.generate(*self._request(batch, group))

    async def _as_stream(self, batch: RolloutBatch, group: PromptGroup) -> None:
        async for _ in self._client.samples.stream(*self._request(batch, group)):
            pass
