"""An environment for verifiers: the model names a number, and doubles it in a second turn.

Given to `vf-eval` by its name, with this folder on the path. Run by tests/live/trainers/test_renderers.py.
"""

from collections.abc import Iterator

import verifiers.v1 as vf

WANTED = ("even", "odd", "prime")

__all__ = ["DoublingEnv", "DoublingTaskset"]


class DoublingTask(vf.Task):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        """The share of digits in the last answer."""
        text = str(trace.nodes[-1].message.content or "")
        return sum(letter.isdigit() for letter in text) / max(1, len(text))


class DoublingTaskset(vf.Taskset[DoublingTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DoublingTask]:
        for kind in WANTED:
            yield DoublingTask(vf.TaskData(name=kind, prompt=f"Name an {kind} number."), self.config.task)


class DoublingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())


class DoublingEnv(vf.Env[DoublingEnvConfig]):
    async def run(self, task: DoublingTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn("Now double it.")
