"""`specdec-mlx server`: its start, and its end in every state.

All that takes a while is imported where signals are awaited already.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec_mlx.errors import MissingPackageError

if TYPE_CHECKING:
    from specdec_mlx.server.engine import Engine
    from specdec_mlx.server.flags import ServerSettings

SIGNALS = signal.SIGINT, signal.SIGTERM
GRACE = 5  # seconds that clients have to take the last of their replies
LOG = "%(asctime)s - %(levelname)s - %(message)s"


class PortError(OSError):
    """The port cannot be listened on."""


def run_server(arguments: Sequence[str]) -> None:
    """Serve until a signal comes; raises what loading the model raises.

    The port is taken first, and answers once the model is loaded. Ends the process with code 1
    for a port that is not free, and with 2 for a wrong flag.
    """
    with Signals() as signals:
        try:
            check_packages()
            from specdec_mlx.server.flags import parse_settings

            settings = parse_settings(arguments)
            serve(settings, signals)
        except PortError as error:
            print(f"specdec-mlx server: {error}", file=sys.stderr)
            raise SystemExit(1) from None


def serve(settings: ServerSettings, signals: Signals) -> None:
    """Serve with these settings; see `run_server`."""
    import mlx.core as mx

    from specdec_mlx.server.engine import Engine
    from specdec_mlx.server.models import Models

    logging.basicConfig(level=settings.log_level, format=LOG)
    if mx.distributed.init().rank() > 0:  # the first one listens for all
        engine = Engine(Models(settings), settings)
        try:
            engine.start()
        finally:
            engine.join()
        return
    with closing(bound(settings.host, settings.port)) as listener:
        engine = Engine(Models(settings), settings)
        try:
            engine.start()
            listen(engine, settings, listener, signals)
        finally:
            engine.stop()  # its thread must not be at work when the process ends


def check_packages() -> None:
    """Raise MissingPackageError without the packages that carry the server."""
    try:
        import msgspec  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"The server needs {error.name}, which is not installed. Use: "
            "pip install 'specdec-mlx[server]'"
        ) from error


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the port, and does not answer yet; raises PortError."""
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise busy(host, port, error) from error
    return listener


def busy(host: str, port: int, error: Exception) -> PortError:
    """The error for a port that cannot be listened on."""
    reason = getattr(error, "strerror", None) or error
    return PortError(
        f"Port {port} of {host} is not free ({reason}). Give another one by --port."
    )


def listen(
    engine: Engine, settings: ServerSettings, listener: socket.socket, signals: Signals
) -> None:
    """Answer requests until a signal comes; all replies are ended then."""
    import uvicorn

    from specdec_mlx.server.app import make_app
    from specdec_mlx.server.flags import KEY_VARIABLE, is_loopback

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """End the texts, so that their clients are told, and then the connections."""
            await asyncio.gather(
                asyncio.to_thread(engine.stop), super().shutdown(sockets)
            )

    app = make_app(engine, settings)
    server = Server(
        uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=GRACE,
        )
    )

    def end() -> None:
        signals.end = lambda: None
        server.should_exit = True

    try:
        listener.listen()
    except OSError as error:  # another server took it while the model was loaded
        raise busy(settings.host, settings.port, error) from error
    logging.info("Listening at %s on port %d", settings.host, listener.getsockname()[1])
    if settings.api_key is None and not is_loopback(settings.host):
        logging.warning(
            "This server has no key: whoever reaches it may use it. Set %s to have one.",
            KEY_VARIABLE,
        )
    signals.end = end
    server.run(sockets=[listener])


class Signals:
    """SIGINT and SIGTERM end the server, with exit code 0.

    Until requests are served that is at once: the model may be half loaded, by a thread that cannot
    be stopped, and nothing is there to be kept. Later ones, while it ends already, are ignored.
    """

    def __init__(self) -> None:
        self.end: Callable[[], None] = partial(os._exit, 0)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._take) for number in SIGNALS
            }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: Any) -> None:
        self.end()
