"""A stand-in for a service of a mixture of experts. The rollout's choice here is not the model's own."""

from pathlib import Path

import torch
from live.trainers.stand_in import StandIn
from moe_model import CHOSEN, EXPERTS, LAYERS

from tailrace.app.trl.route_replay import padded_routes, replayed_routes
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.results.routed_experts import RoutedExperts


class OtherExperts(StandIn):
    """Answers have the logprobs of experts next to those that the model would choose. `tells`: they have them, too;
    the samples of the index OWN have none, and the model's own logprobs.
    """

    OWN = 0

    def __init__(self, model: Path, tells: bool):
        super().__init__(model)
        self.tells = tells

    @torch.no_grad()
    def _sample(self, batch, group, index: int):
        drawn = super()._sample(batch, group, index)
        if index == self.OWN:
            return drawn
        ids = torch.tensor([[*group.token_ids, *drawn.token_ids]])
        own = self.model(ids, output_router_logits=True).router_logits
        routes = torch.zeros(ids.shape[1] - 1, LAYERS, CHOSEN, dtype=torch.uint8)
        for layer, logits in zip((0, 2), own, strict=True):
            routes[:, layer] = (logits.topk(CHOSEN).indices[:-1] + 1) % EXPERTS
        found = RoutedExperts(routes.numpy())
        with replayed_routes(self.model, padded_routes([found], [0], ids.shape[1])):
            law = self.model(ids).logits[0, :-1].double().log_softmax(-1)
        made = law.gather(1, ids[0, 1:, None])[-len(drawn.token_ids) :, 0].tolist()
        told = {"routed_experts": found} if self.tells else {}
        return drawn.model_copy(update={"logprobs": tuple(made), "raw_logprobs": tuple(made)} | told)

    def send_weights_blocking(self, version: int, tensors) -> WeightsLoaded:
        self.version, self.sent = version, {name: tuple(tensor.shape) for name, tensor in tensors}
        return WeightsLoaded(version=version, digest="0" * 16, replicas=("one",))
