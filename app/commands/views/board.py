"""`tailrace board`: a page on loopback that shows a running service as it changes."""

import socket

import click

from tailrace.app.errors import BadInput


@click.command()
@click.option("--address", default="auto", show_default=True, help="A running cluster: auto, or host:port.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8280, show_default=True, help="On loopback; 0: a free one."
)
@click.option("--every-s", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Between looks.")
def command(address, port, every_s):
    """Serve a page that shows batches, replicas, the tail as it forms, KV and troubles, until Ctrl-C.

    It listens on 127.0.0.1 alone and changes nothing. For another machine's service forward the port by ssh.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise BadInput(f"--port {port}: {error.strerror}; give another one, or 0") from error
    import uvicorn

    from tailrace.app.board.routes import make_board
    from tailrace.app.cluster import connect
    from tailrace.deployments.messages.roles import Role

    app = make_board(connect(address, role=Role.EVALUATOR), every_s)
    click.echo(f"http://127.0.0.1:{listener.getsockname()[1]}", err=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    server.run(sockets=[listener])
