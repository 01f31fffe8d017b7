"""A driver's process: batch after batch, one line of JSON on stdout for each event, until SIGTERM and a batch's end.

Run as `python -m tailrace.lab.soak.driver SCRIPT ADDRESS FIRST on|once` by lab/soak/driver_process.py: the file of a
`DriverScript`, the cluster, the number of the first batch, and whether others follow it.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import connect
from tailrace.lab.soak.scripts import DriverScript


def say(event: str, **values) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


async def drive(client: RolloutClient, script: DriverScript, number: int, once: bool) -> None:
    """Updates the weights if the script has any, then rolls out; from batch `number` on, or this batch alone."""
    ending = asyncio.Event()
    if once:
        ending.set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)  # Ray's own handler aborts
    loaded = None
    while True:
        version = script.version(number)
        if version is not None and version != loaded:
            await client.update_weights(version, script.folder(version))
            loaded = version
            say("updated", version=version)
        say("began", batch=number)
        async for group in client.rollout(script.batch(number)):
            say("group", batch=number, group=group.model_dump(mode="json"))
        say("ended", batch=number)
        if ending.is_set():
            return
        number += 1


def main() -> int:
    file, address, first, rest = sys.argv[1:]
    script = DriverScript.model_validate_json(Path(file).read_text())
    try:
        asyncio.run(drive(connect(address, script.app_name, script.role), script, int(first), rest == "once"))
    except Exception as error:  # noqa: BLE001 - the edge of the process: the soak reports the error
        say("error", text=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
