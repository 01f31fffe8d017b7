"""What routes tell a trainer of an update of the weights that is loaded. Read by every client over HTTP."""

from tailrace.deployments.messages.rollout import WeightsLoaded

TOLD = {"replicas", "paused_s", "set_aside", "warnings"}
"""Fields of WeightsLoaded in an answer, beside version and digest."""


def told(loaded: WeightsLoaded) -> dict:
    """Returns the answer of a route. `message`: one line, with replicas that are set aside."""
    aside = "".join(f"; {replica} is set aside: {reason}" for replica, reason in loaded.set_aside.items())
    named = {"weight_version": str(loaded.version), "weights_digest": loaded.digest}
    return {"message": f"weights {loaded.version} are loaded{aside}"} | named | loaded.model_dump(include=TOLD)


def loaded_of(answer: dict) -> WeightsLoaded:
    """Returns the update of an answer."""
    more = {name: answer[name] for name in TOLD}
    return WeightsLoaded(version=int(answer["weight_version"]), digest=answer["weights_digest"], **more)
