"""Benchmark of a direct channel: a ZeroMQ round trip of 1 KiB over loopback, with msgpack on both sides.

The other side is a process of its own that unpacks, packs and answers. Called by control.py.
"""

import time
from multiprocessing import get_context

from tailrace.lab.benchmarks.control_plane.rpc_latency import IN_FLIGHT, WARM_UP, spread_us

TOKENS = 200
"""Number of draft tokens of a message. msgpack takes five bytes for each of these, so that a message has 1 KiB with its
other fields.
"""

ANSWER_S = 10.0


def measure(count: int) -> dict:
    """Returns `round_trip_us`, and messages per second with IN_FLIGHT under way. Raises TimeoutError if no answer comes
    within ANSWER_S.
    """
    import zmq
    from msgspec import msgpack

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, int(1e3 * ANSWER_S))
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    echo = get_context("spawn").Process(target=_echo, args=(port,), daemon=True)
    echo.start()
    message = {"sample": "batch/prompt-0#0", "at": 4096, "tokens": [70_000 + n for n in range(TOKENS)]}

    def send() -> None:
        socket.send(msgpack.encode(message))

    def receive() -> None:
        msgpack.decode(socket.recv())

    def round_trip() -> float:
        began_s = time.perf_counter()
        send()
        receive()
        return time.perf_counter() - began_s

    try:
        for _ in range(WARM_UP):
            round_trip()
        alone_s = [round_trip() for _ in range(count)]
        began_s = time.perf_counter()
        for number in range(count + IN_FLIGHT):
            if number >= IN_FLIGHT:
                receive()
            if number < count:
                send()
        took_s = time.perf_counter() - began_s
    except zmq.Again:
        raise TimeoutError(f"the other end of a ZeroMQ socket has not answered for {ANSWER_S:.0f} s") from None
    finally:
        echo.terminate()
        echo.join()
        context.destroy(linger=0)
    bytes_ = len(msgpack.encode(message))
    return {"message_bytes": bytes_, "round_trip_us": spread_us(alone_s), "messages_per_s": round(count / took_s, 1)}


def _echo(port: int) -> None:
    import zmq
    from msgspec import msgpack

    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    while True:
        socket.send(msgpack.encode(msgpack.decode(socket.recv())))
