"""A rollout whose whole cluster is lost: the head is killed with all its processes, started again, and deployed to.

The cluster and the driver are separate processes, since Ray ends a driver with its cluster. The second driver has the
same --out as the first, so groups that were finished are not made again. Called by `roll_all` in tokens.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import yaml

from tailrace.app.cluster import LOOPBACK_ONLY, declared
from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch
from tailrace.kvpool.programs import free_port

TAILRACE = (sys.executable, "-m", "tailrace")
LOOPBACK = "127.0.0.1"
START_S = 300.0
DRIVER_S = 1800.0


def roll_over_restart(file: ServeFile, policies: dict, batch: RolloutBatch) -> dict:
    """Rolls out a batch, and restarts the head as soon as a group is there. Returns the figures of a run, as `roll`."""
    with TemporaryDirectory(prefix="tailrace-head-") as folder:
        head = Head(file, policies, Path(folder))
        driver = Driver(batch, Path(folder), head.address)
        with head.running():
            began_s = time.monotonic()
            kept = driver.killed_with(head)
        with head.running():
            driver.finish()
            seconds = round(time.monotonic() - began_s, 1)
        groups = driver.groups()
    note = f"restarted the head with {kept} of {len(groups)} groups there" if kept < len(groups) else ""
    nothing = {"pulled_tokens": 0, "corrupt_blocks": 0, "races": 0}  # the lost head's counts are lost with it
    return {"groups": groups, "seconds": seconds, "note": note, **nothing}


class Head:
    """A local head with the service on it, as `tailrace serve` starts it."""

    def __init__(self, file: ServeFile, policies: dict, folder: Path):
        self._port, self._dashboard_port = free_port(LOOPBACK), free_port(LOOPBACK)
        self.address = f"{LOOPBACK}:{self._port}"
        self._config, self._log = folder / "serve.yaml", folder / "serve.log"
        values = declared(file)
        deployments = values["applications"][0]["deployments"]
        coordinator = next(one for one in deployments if one["name"] == "Coordinator")
        coordinator["user_config"] = (coordinator.get("user_config") or {}) | {"policies": policies}
        self._config.write_text(yaml.safe_dump(json.loads(json.dumps(values))))
        self._serve: psutil.Popen | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Starts the head and the service; all processes are ended at the exit."""
        ports = ("--port", str(self._port), "--dashboard-port", str(self._dashboard_port))
        with self._log.open("ab") as log:
            command = (*TAILRACE, "serve", "--config", str(self._config), *ports)
            self._serve = psutil.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self._await_service()
            yield
        finally:
            self.kill()

    def _await_service(self) -> None:
        deadline_s = time.monotonic() + START_S
        while "deploying" not in self._log.read_text():
            if self._serve.poll() is not None or time.monotonic() > deadline_s:
                raise Failed(f"the head did not start: {self._log.read_text()[-300:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """Kills every process of the cluster, without a warning."""
        processes = [*self._serve.children(recursive=True), self._serve] if self._serve.is_running() else []
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=START_S)
        self._log.write_text("")


class Driver:
    """`tailrace rollout`, run again with the same --out until all groups are there."""

    def __init__(self, batch: RolloutBatch, folder: Path, address: str):
        self._batch, self._out, self._log = batch, folder / "results.jsonl", folder / "driver.log"
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(group.model_dump_json(exclude_none=True) + "\n" for group in batch.groups))
        options = {"prompts": prompts, "out": self._out, "address": address, "seed": batch.seed, "step": batch.step}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._command = (*TAILRACE, "rollout", *words)

    def _start(self) -> subprocess.Popen:
        environment = os.environ | LOOPBACK_ONLY | {"RAY_AUTH_MODE": "token"}
        with self._log.open("wb") as log:
            return subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)

    def killed_with(self, head: Head) -> int:
        """Runs until a group is there, and kills the head. Returns the number of groups that are kept. Raises Failed if
        the driver fails, or has no group after DRIVER_S.
        """
        driver, deadline_s = self._start(), time.monotonic() + DRIVER_S
        try:
            while not self._lines():
                if driver.poll() is not None:
                    raise Failed(f"the driver ended: {self._log.read_text()[-300:]}")
                if time.monotonic() > deadline_s:
                    raise Failed(f"the driver has no group after {DRIVER_S:.0f} s")
                time.sleep(0.1)
            head.kill()
        finally:
            driver.kill()
            driver.wait()
        return len(self._lines())

    def finish(self) -> None:
        """Runs until all groups are there. Raises Failed if the driver fails, or has not ended after DRIVER_S."""
        driver = self._start()
        try:
            failed = driver.wait(DRIVER_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"the second driver has not ended after {DRIVER_S:.0f} s") from None
        finally:
            driver.kill()
            driver.wait()
        if failed:
            raise Failed(f"the second driver ended: {self._log.read_text()[-300:]}")

    def _lines(self) -> list[bytes]:
        lines = self._out.read_bytes().splitlines(keepends=True) if self._out.exists() else []
        return [line for line in lines if line.endswith(b"\n")]

    def groups(self) -> list[GroupResult]:
        kept = ("prompt_id", "prompt_token_ids", "samples")
        lines = map(json.loads, self._lines())
        return [GroupResult(batch_id=self._batch.batch_id, **{key: line[key] for key in kept}) for line in lines]
