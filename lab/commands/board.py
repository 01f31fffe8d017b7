"""`tailrace board`: a page on loopback that shows a running service as it changes, or replays a recorded run."""

import gzip
import socket
import zlib
from pathlib import Path

import click

from tailrace.app.errors import BadInput


@click.command()
@click.option("--address", default="auto", show_default=True, help="A running cluster: auto, or host:port.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8280, show_default=True, help="On loopback; 0: a free one."
)
@click.option("--journal", type=click.Path(path_type=Path), default=None, help="A recorded run instead of a service.")
def command(address, port, journal):
    """Serve a page that shows batches, replicas, the tail as it forms, KV, drafts and faults, until Ctrl-C.

    The server listens on 127.0.0.1 alone and changes nothing. To see a service on another machine, forward the port by
    ssh, or open /board of its gateway. With --journal, a file of `rollout --journal`, a slider chooses the moment of
    the run.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise BadInput(f"--port {port}: {error.strerror}; give another one, or 0") from error
    import uvicorn

    app = _live(address) if journal is None else _recorded(journal)
    click.echo(f"http://127.0.0.1:{listener.getsockname()[1]}", err=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    server.run(sockets=[listener])


def _live(address: str):
    from tailrace.app.board.routes import make_board
    from tailrace.app.cluster import connect
    from tailrace.deployments.messages.roles import Role

    return make_board(connect(address, role=Role.EVALUATOR))


def _recorded(journal: Path):
    from tailrace.app.board.routes import make_playback
    from tailrace.lab.timeline.playback import recording
    from tailrace.lab.timeline.record import record

    opened = gzip.open if journal.suffix == ".gz" else open
    try:
        with opened(journal, "rt", encoding="utf-8") as lines:
            recorded = record(lines)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{journal}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise BadInput(f"{journal}: {error}; give a file of `rollout --journal`") from error
    return make_playback(recording(journal.name, recorded))
