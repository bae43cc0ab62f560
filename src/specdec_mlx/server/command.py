"""`specdec-mlx server`: a server for agents and chats.

Here are its start, and its end in every state. All that takes a while is imported where signals are
awaited already.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Any

from specdec_mlx.cli.backends import require_mlx
from specdec_mlx.errors import MissingPackageError

if TYPE_CHECKING:
    from specdec_mlx.server.engine import Engine
    from specdec_mlx.server.flags import ServerSettings

SIGNALS = signal.SIGINT, signal.SIGTERM
LONGEST_END = 8.0  # seconds after a signal in which the process has ended
KEEPING = 2.0  # seconds of them for what is kept, where the process is ended at work
AT_ONCE = 0.5  # seconds in which a second signal is the first one, sent to a group of processes too
LOG = "%(asctime)s - %(levelname)s - %(message)s"
AGENTS = "https://specdec-mlx.github.io/specdec-mlx/agents/"
RANK_VARIABLES = "MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"
"""Environment variables that say that this process is one of several ranks."""


class PortError(OSError):
    """The port cannot be listened on."""


def run(arguments: Sequence[str]) -> None:
    """Serve until a signal comes; raises what loading the model raises.

    The port is taken first, and answers once the model is loaded. Ends the process with code 1
    for a port that is not free, and with 2 for a wrong flag. Both come before MLX is imported.
    """
    with Signals() as signals, ExitStack() as stack:
        try:
            check_packages()
            from specdec_mlx.server.flags import parse_flags, settings_of

            parser, flags = parse_flags(arguments)
            to_terminal = logging.StreamHandler()
            to_terminal.addFilter(keep_on_one_line)
            logging.basicConfig(level=flags.log_level, format=LOG, handlers=[to_terminal])
            listener = None
            if not any(name in os.environ for name in RANK_VARIABLES):
                listener = stack.enter_context(closing(bound(flags.host, flags.port)))
                logging.info(
                    f"Loading {flags.model} ..."
                    if flags.model
                    else "Starting without a model: each request names one."
                )
            require_mlx()
            serve(parser.check(partial(settings_of, flags)), signals, listener)
            signals.leave()
        except PortError as error:
            print(f"specdec-mlx server: {error}", file=sys.stderr)
            raise SystemExit(1) from None


def keep_on_one_line(record: logging.LogRecord) -> bool:
    """Write the line ends and terminal escapes of a message as text. True: the record is logged.

    Clients choose names in messages, and could add lines of their own.
    """
    message = record.getMessage()
    record.msg = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    record.args = None
    return True


def serve(
    settings: ServerSettings, signals: Signals, listener: socket.socket | None = None
) -> None:
    """Serve with these settings; see `run`.

    Args:
        listener: a socket that has the port already.
    """
    import mlx.core as mx

    from specdec_mlx.server.engine import Engine
    from specdec_mlx.server.models import Models

    if mx.distributed.init().rank() > 0:  # the first one listens for all
        engine = Engine(Models(settings), settings)
        try:
            engine.start()
        finally:
            engine.stop()
        return
    with closing(listener or bound(settings.host, settings.port)) as listener:
        engine = Engine(Models(settings), settings)
        try:
            engine.start()
            listen(engine, settings, listener, signals)
        except BaseException:
            engine.stop()  # its thread must not be at work when Python ends
            raise
        engine.end()
        signals.may_leave = not engine.ranks.are_several


def check_packages() -> None:
    """Raise MissingPackageError without the packages that carry the server."""
    for name in ("msgspec", "starlette", "uvicorn"):
        if find_spec(name) is None:
            raise MissingPackageError(
                f"The server needs {name}, which is not installed. Use: "
                "pip install 'specdec-mlx[server]'"
            )


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the port, and does not answer yet; raises PortError."""
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
        # The port of a server that has just ended can be used at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise busy(host, port, error) from error
    return listener


def address_of(host: str, port: int) -> str:
    """The address that clients on this machine are given."""
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def busy(host: str, port: int, error: Exception) -> PortError:
    reason = getattr(error, "strerror", None) or error
    return PortError(f"Port {port} of {host} is not free ({reason}). Give another one by --port.")


def listen(
    engine: Engine, settings: ServerSettings, listener: socket.socket, signals: Signals
) -> None:
    """Answer requests until a signal comes; all replies are ended then."""
    import asyncio

    import uvicorn

    from specdec_mlx.server.app import make_app
    from specdec_mlx.server.engine import GRACE
    from specdec_mlx.server.flags import KEY_VARIABLE, is_loopback

    class EngineServer(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """End the texts, so that their clients are told, and then the connections."""
            await asyncio.gather(asyncio.to_thread(engine.end), super().shutdown(sockets))

    app = make_app(engine, settings)
    server = EngineServer(
        uvicorn.Config(
            app,
            log_config=None,
            http=http_protocol(),
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=GRACE,
            access_log=False,
        )
    )

    def end() -> None:
        server.should_exit = True

    try:
        # Not earlier: a client would connect, and get no answer while the model is loaded.
        listener.listen()
    except OSError as error:  # another server took it while the model was loaded
        raise busy(settings.host, settings.port, error) from error
    address = address_of(settings.host, listener.getsockname()[1])
    logging.info("Ready: %s (how agents are set up: %s)", address, AGENTS)
    if settings.api_key is None and not is_loopback(settings.host):
        logging.warning(
            "This server has no key: whoever reaches it may use it. Set %s to have one.",
            KEY_VARIABLE,
        )
    signals.end, signals.keep = end, engine.keep
    server.run(sockets=[listener])


def http_protocol() -> Any:
    """The class of connections, by httptools where it is installed; h11 has bounds of its own."""
    try:
        from specdec_mlx.server.connections import BoundedConnection
    except ImportError:
        return "h11"
    return BoundedConnection


class Signals:
    """SIGINT and SIGTERM end the server, with exit code 0.

    Until requests are served that is at once: the model may be half loaded, by a thread that cannot
    be stopped, and nothing is there to be kept. Then the first signal ends all texts in peace. The
    second one, or `LONGEST_END` seconds, ends the process whatever it does. `keep` writes what is
    kept to its files.
    """

    def __init__(self) -> None:
        self.end: Callable[[], None] = partial(os._exit, 0)
        self.keep: Callable[[], None] = lambda: None
        self.may_leave, self._come_at = False, inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._come_at == inf:
            self._come_at = now
            # The process may need longer to end than its user waits.
            watch = threading.Timer(LONGEST_END, self._leave_soon)
            watch.daemon = True
            watch.start()
            self.end()
        elif now - self._come_at > AT_ONCE:
            self._leave_soon()

    def _leave_soon(self) -> None:
        keeper = threading.Thread(target=self.keep, daemon=True)
        keeper.start()
        # A slow disk must not keep the process alive.
        keeper.join(KEEPING)
        os._exit(0)

    def leave(self) -> None:
        """End the process if a signal has come and all is kept: Python need not free anything."""
        if self._come_at < inf and self.may_leave:
            # Everything that `os._exit` leaves out.
            atexit._run_exitfuncs()
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
