"""The gateway over the simulated cluster as a server, for thousands of requests in minutes without an engine.

Invariant: routes, tokenizer and coordinator are the real ones; engines alone are simulated. Run by `schema.py`:
`python simulated.py PORT MODEL-FOLDER FOLDER`. It serves until it is ended; its last line says how many engines were
lost. A trainer's token is TOKEN.
"""

import asyncio
import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random

import uvicorn

from tailrace.app.calls.client import RolloutClient
from tailrace.app.gateway.chat.answer_parser import AnswerParser
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService, ServedModel
from tailrace.deployments.batches.prompts import Prompts
from tailrace.lab.fuzz import cluster as simulation
from tailrace.lab.fuzz.drivers import TaskHeartbeat
from tailrace.lab.fuzz.log_disk import LogDisk
from tailrace.lab.fuzz.run import plan_of
from tailrace.lab.fuzz.virtual_time import PROCESS

TOKEN = "trainer-" + "t" * 16
MAX_MODEL_LEN = 256


class Server(uvicorn.Server):
    """uvicorn's, which leaves signals alone: its own handler ends the process before the last line is printed."""

    capture_signals = nullcontext


def of_processes(loop: asyncio.AbstractEventLoop, coroutine, context=None, **settings) -> asyncio.Task:
    """A task that its simulated process knows, as in `VirtualLoop`."""
    task = asyncio.Task(coroutine, loop=loop, context=context, **settings)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(process.tasks.pop)
    return task


async def serve(port: int, model: Path, folder: Path) -> None:
    asyncio.get_running_loop().set_task_factory(of_processes)
    size = replace(plan_of(0).size, replicas=2, limits=None, mean_tokens=40, step_tokens=8, step_s=0.001, policies={})
    prompts = Prompts(str(model), MAX_MODEL_LEN)
    simulation.SimulatedPrompts = lambda: prompts  # of coordinators, which else know numbers alone
    cluster = simulation.SimulatedCluster(size, Random(0), LogDisk("sound", folder, Random(0)))
    tokens = folder / "tokens"
    tokens.write_text(f"trainer {TOKEN}\n")
    config = GatewayConfig(tokens_file=str(tokens), tool_parser="hermes")
    service = GatewayService(
        lambda role: RolloutClient(handle=cluster.handle(), heartbeat=TaskHeartbeat, role=role), config
    )
    parser = AnswerParser(config.tool_parser, None, prompts.tokenizer)
    service._model = ServedModel(model.name, str(model), MAX_MODEL_LEN, prompts, parser)
    app = make_app(service, config)
    server = Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=5))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
    await server.serve()
    print(json.dumps({"engines_lost": len(cluster.gone), "defects": cluster.defects}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
