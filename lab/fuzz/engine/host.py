"""The process of the engine that is fuzzed: it starts the engine, and runs rounds until None comes.

It sends its parent each event (see `Round.say`), so the parent knows where it hangs or dies. Its output goes to a file.
On SIGUSR1 the stacks of all its threads go there too, even if one thread holds Python's lock.
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path
from queue import Queue
from typing import Any

from tailrace.lab.fuzz.engine.values import CONTEXT_TOKENS

MAX_KEYS = 20
"""Maximum number of keys of a mate that are tried for an answer without a close call."""


def serve(connection, log: str, model: str, draft: dict[str, Any], redraws: bool = False) -> None:
    """Runs rounds until None comes. `connection`: an end of a pipe. `log`: path of a file."""
    to_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(to_file, sys.stdout.fileno())
    os.dup2(to_file, sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    from tailrace.deployments.engine.runner import EngineRunner
    from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
    from tailrace.lab.fuzz.engine.entry import RequestEntry
    from tailrace.lab.fuzz.engine.round import Round

    config = EngineConfig(
        model=model,
        max_model_len=CONTEXT_TOKENS,
        max_running=16,
        kv_cache_gib=0.25,
        draft=DraftConfig(**draft),
        redraw_close_calls=redraws,
    )
    engine = EngineRunner(config, "fuzz", rank=os.getpid())
    entry = RequestEntry(model, CONTEXT_TOKENS)
    keys, reference = alone(engine)
    connection.send(("ready", 0))
    while (asked := connection.recv()) is not None:
        number, requests = asked
        one = Round(
            engine=engine,
            entry=entry,
            reference=reference,
            keys=keys,
            number=number,
            context_tokens=CONTEXT_TOKENS,
            say=lambda *event: connection.send(event),
        )
        report = one.run(requests)
        connection.send(("done", report | {"rss_mb": rss_mb()}))
    engine.stop()


def alone(engine) -> tuple[list[int], list]:
    """Returns each mate's key and its answer alone, without drafts. No answer has a close call. Raises RuntimeError if
    each key gives one."""
    from tailrace.lab.fuzz.engine.mates import MATES, mate

    keys, answers = [], []
    for number in range(MATES):
        for key in range(MAX_KEYS):
            box: Queue = Queue()
            engine.submit(mate(number, key, None), box.put)
            answer = box.get()
            if isinstance(answer, Exception):
                raise answer
            if not answer.close_calls:
                break
        else:
            raise RuntimeError(f"mate {number}: each of {MAX_KEYS} keys gives a close call; it is no measure")
        keys.append(key)
        answers.append(answer)
    return keys, answers


def rss_mb() -> float:
    """Returns the resident memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
