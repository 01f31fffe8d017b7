"""The process of the engine that is fuzzed: it starts one, and runs rounds until None comes.

It sends its parent each thing that happens (see `Round.say`), so the parent knows where it hangs or dies. Its output
goes to a file; on SIGUSR1 the stacks of all its threads do, too, even if one holds Python's lock.
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path
from queue import Queue
from typing import Any

from tailrace.app.fuzz.engine.values import CONTEXT_TOKENS

MAX_KEYS = 20
"""Keys of mates that are tried for answers without a close call."""


def serve(connection, log: str, model: str, draft: dict[str, Any], redraws: bool = False) -> None:
    """Runs rounds until None comes. `connection`: of a pipe. `log`: path of a file."""
    to_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(to_file, sys.stdout.fileno())
    os.dup2(to_file, sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    from tailrace.app.fuzz.engine.door import RequestDoor
    from tailrace.app.fuzz.engine.round import Round
    from tailrace.deployments.engine.runner import EngineRunner
    from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig

    config = EngineConfig(
        model=model,
        max_model_len=CONTEXT_TOKENS,
        max_running=16,
        kv_cache_gib=0.25,
        draft=DraftConfig(**draft),
        redraw_close_calls=redraws,
    )
    engine = EngineRunner(config, "fuzz", rank=os.getpid())
    door = RequestDoor(model, CONTEXT_TOKENS)
    key, reference = alone(engine)
    connection.send(("ready", 0))
    while (asked := connection.recv()) is not None:
        number, requests = asked
        one = Round(
            engine=engine,
            door=door,
            reference=reference,
            key=key,
            number=number,
            context_tokens=CONTEXT_TOKENS,
            say=lambda *event: connection.send(event),
        )
        report = one.run(requests)
        connection.send(("done", report | {"rss_mb": rss_mb()}))
    engine.stop()


def alone(engine) -> tuple[int, list]:
    """Returns the mates' key and their answers, each run by itself without drafts; none is a close call."""
    from tailrace.app.fuzz.engine.mates import MATES, has_close_call, mate

    for key in range(MAX_KEYS):
        answers = []
        for number in range(MATES):
            box: Queue = Queue()
            engine.submit(mate(number, key, None), box.put)
            answers.append(box.get())
            if isinstance(answers[-1], Exception):
                raise answers[-1]
        if not has_close_call(answers):
            return key, answers
    raise RuntimeError(f"each of {MAX_KEYS} keys gives a close call; the mates are no measure")


def rss_mb() -> float:
    """Returns the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
