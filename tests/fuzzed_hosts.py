"""Processes in the place of a fuzzed engine, each with a fault of its own. Used by test_engine_fuzz.py."""

import faulthandler
import os
import signal
import time


def _rounds(connection, log: str):
    connection.send(("ready", 0))
    while (asked := connection.recv()) is not None:
        connection.send(("entry", 0))
        yield asked[1]


def _done(connection, count: int) -> None:
    fate = {"state": "answered", "reason": "", "seconds": 0.1, "tokens": 2}
    report = {"fates": [fate] * count, "problems": [], "noise": 0.0, "mates": 3, "steps": 1, "rss_mb": 100.0}
    connection.send(("done", report))


def sound(connection, log: str) -> None:
    for requests in _rounds(connection, log):
        _done(connection, len(requests))


def dies_of_seven(connection, log: str) -> None:
    for requests in _rounds(connection, log):
        if any(request["message"].get("number") == 7 for request in requests):
            os._exit(9)
        _done(connection, len(requests))


def dies_after_its_answer(connection, log: str) -> None:
    for requests in _rounds(connection, log):
        _done(connection, len(requests))
        os._exit(5)


def hangs(connection, log: str) -> None:
    with open(log, "a") as file:
        faulthandler.register(signal.SIGUSR1, file)
        for _ in _rounds(connection, log):
            while True:
                pass


def prints(connection, log: str) -> None:
    for requests in _rounds(connection, log):
        with open(log, "a") as file:
            file.write("Traceback (most recent call last):\nValueError: of the engine\n")
        _done(connection, len(requests))


def does_not_start(connection, log: str) -> None:
    time.sleep(0.01)
    with open(log, "a") as file:
        file.write("no such model\n")
