"""The server that verl's clients call: an actor without a GPU, in front of a running service.

Invariant: tokens depend on weights, prompt, settings, seed, step, group and index, never on the order of calls.
Owns the client, the joined groups and the global step of each weights version. verl's control calls do nothing here:
the service keeps requests in flight over an update of the weights, and manages its own memory.
"""

import asyncio
from typing import Any

import numpy as np

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import connect
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, SampleResult
from tailrace.weights import next_version
from tailrace_verl.global_steps import GlobalSteps
from tailrace_verl.joined_groups import JoinedGroups
from tailrace_verl.replies import ended, reply
from tailrace_verl.requests import Asked, Lengths, asked
from tailrace_verl.routes import KEEP, KEY, check_kept, context_of, routes
from tailrace_verl.settings import Settings
from tailrace_verl.weights_update import WeightsUpdate

TEXT_ONLY = "not supported: prompts are token ids alone; remove it"


class TailraceServer:
    """`seed`: of the run, verl's `rollout.seed`. `unsaved`: see WeightsUpdate. `replays`: answers have the routed
    experts, verl's `rollout.enable_rollout_routing_replay`. Make it where an event loop runs.
    """

    def __init__(
        self,
        settings: Settings,
        lengths: Lengths,
        seed: int,
        unsaved: tuple[str, ...] = (),
        replays: bool = False,
    ):
        self._settings, self._lengths, self._unsaved, self._replays = settings, lengths, unsaved, replays
        self._groups = JoinedGroups(self._roll_out, seed)
        self._steps = GlobalSteps()
        self._client: RolloutClient | None = None
        self._connecting = asyncio.Lock()

    async def connected(self) -> RolloutClient:
        """The client, made once. Passes on the errors of `tailrace.connect`."""
        async with self._connecting:
            if self._client is None:
                self._client = await asyncio.to_thread(self._connect)
        return self._client

    def _connect(self) -> RolloutClient:
        return connect(self._settings.address, self._settings.app_name)

    async def check(self) -> int:
        """The service answers. Returns its weights version. Raises ValueError, one line, if verl replays routes and
        an engine keeps none.
        """
        client = await self.connected()
        if self._replays:
            await check_kept(client.status)
        return (await client.status()).weights_version

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list | None = None,
        video_data: list | None = None,
        audio_data: list | None = None,
        mm_processor_kwargs: dict | None = None,
        priority: int = 0,
        group: str | None = None,
        index: int | None = None,
        of: int | None = None,
        step: int = 0,
    ):
        """One sample. `group`, `index`, `of`, `step`: see `requests.asked`, whose ValueError is passed on."""
        for name, given in (("image_data", image_data), ("video_data", video_data), ("audio_data", audio_data)):
            if given:
                raise ValueError(f"{name}: {TEXT_ONLY}")
        wanted = asked(prompt_ids, sampling_params, request_id, self._lengths, group, index, of, step)
        sample = ended(await self._groups.sample(wanted, priority))
        found = await self._routes(wanted, sample, priority) if self._replays else None
        return reply(sample, self._steps, bool(sampling_params.get("logprobs")), wanted.keyed_by, found)

    async def _routes(self, wanted: Asked, sample: SampleResult, priority: int) -> np.ndarray:
        """See `routes`. A sample from the token log, which keeps none, has them computed again, under the present
        weights. Raises ValueError, one line, if there are none then.
        """
        found = routes(wanted, sample)
        if found is None:
            wanted = context_of(wanted, sample)
            found = routes(wanted, ended(await self._groups.sample(wanted, priority)))
        if found is None:
            raise ValueError(f"{KEY}: a sample has no routed experts; {KEEP}")
        return found

    async def _roll_out(self, batch: RolloutBatch) -> GroupResult:
        client = await self.connected()
        (group,) = [group async for group in client.rollout(batch)]
        return group

    # ---- weights -------------------------------------------------------------------------------------

    async def next_weights(self, global_steps: int | None) -> WeightsUpdate:
        """Allots a version to a step's weights. One that ranks have published and that ends unloaded is not allotted
        again; the version of a folder that is refused is.
        """
        version = await asyncio.to_thread(next_version, await self.connected())
        self._steps.record(version, global_steps)
        return WeightsUpdate(version, self._settings, self._unsaved)

    async def load_weights(self, version: int, folder: str) -> None:
        """Loads a written folder on every replica. Passes on WeightsRejected."""
        await (await self.connected()).update_weights(version, folder)

    # ---- calls of verl that have nothing to do here --------------------------------------------------

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Requests in flight continue under the new weights, each token with its version."""

    async def resume_generation(self) -> None:
        """Nothing was held."""

    async def clear_kv_cache(self) -> None:
        """KV written under one version is never read under another."""

    async def release_kv_cache(self) -> None:
        """The engines have GPUs of their own."""

    async def resume_kv_cache(self) -> None:
        """Nothing was released."""

    async def sleep(self) -> None:
        """The engines have GPUs of their own."""

    async def wake_up(self) -> None:
        """Nothing sleeps."""

    async def start_profile(self, **kwargs) -> None:
        """The service has `tailrace profile`."""

    async def stop_profile(self) -> None:
        """Nothing was started."""
