"""``anaphora serve``: from options to a running server, and to its proper end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn

from anaphora.api.app import create_app
from anaphora.api.books import Books
from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from anaphora.config import Config
from anaphora.diagnose.memory import PromptMemory
from anaphora.errors import AddressError, ConfigError
from anaphora.keys import Keys
from anaphora.responses import ResponseStore, default_responses_file
from anaphora.roster import Roster
from anaphora.usage.ledger import Ledger, default_usage_file
from anaphora.usage.prices import PriceTable

_CLOSING_SECONDS = 5
"""How long ended requests may take to tell their clients."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and who may come."""

    host: str
    port: int
    keys_required: bool

    @property
    def url(self) -> str:
        """For a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class Server:
    """A socket that is taken, and what will be served on it.

    Made before the model is loaded, so that what can't work is known at once.
    """

    def __init__(self, config: Config) -> None:
        """Take the address.

        Raises:
            AddressError: the port is in use, or the host is not one of this machine's.
            ConfigError: others could reach the server, and there are no keys; or the prices can't
                be understood.
            KeysError: the key file can't be used.
        """
        self._config = config
        self._keys = Keys(config.keys_file, config.api_key)
        self._prices = PriceTable() if config.prices is None else PriceTable.load(config.prices)
        self._socket = _bind(config.host, config.port)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port, self._keys.required)
        if not self._keys.required and not ipaddress.ip_address(host).is_loopback:
            self._socket.close()
            raise ConfigError(
                f"host is {config.host} and there are no API keys: make one with "
                "'anaphora keys add NAME', or use 127.0.0.1 to serve this machine only"
            )

    def run(self, roster: Roster, announce: Callable[[], None]) -> None:
        """Serve until a SIGTERM or SIGINT, then end what runs and close the model.

        ``announce`` is called when requests are taken. Raises what loading the model does, and
        :class:`~anaphora.errors.AddressError` where another server took the address meanwhile.
        """
        with (
            self._socket,
            roster,
            self._responses() as responses,
            closing(self._books()) as books,
        ):
            serving = Serving(roster, max_waiting=self._config.queue_size, books=books)
            app = create_app(serving, self._options(), self._keys, responses)
            uvicorn_config = uvicorn.Config(
                app,
                ws="none",
                log_config=None,
                access_log=False,
            )
            server = _Uvicorn(uvicorn_config, serving, self._config.drain_seconds, announce)
            # uvicorn takes these signals while it runs, and raises them again at its end; then
            # the model still has to be closed.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, server.handle_exit)
            try:
                self._socket.listen()  # uvloop would not tell that another server does already
                server.run(sockets=[self._socket])
            except OSError as error:
                raise _address_error(self._config.host, self._config.port, error) from error

    @contextmanager
    def _responses(self) -> Iterator[ResponseStore | None]:
        """The store of responses; ``None``: none are stored."""
        config = self._config
        if not config.store_days:
            yield None
            return
        path = default_responses_file(config.cache_dir.expanduser())
        store = ResponseStore(path, keep_days=config.store_days, budget=config.store_budget)
        try:
            yield store
        finally:
            store.close()

    def _books(self) -> Books:
        config = self._config
        memory = PromptMemory(max_bytes=config.explain_memory)
        if config.usage_file == "off":
            return Books(None, self._prices, memory)
        path = config.usage_file or default_usage_file(config.cache_dir.expanduser())
        return Books(Ledger(path, keep_days=config.usage_days), self._prices, memory)

    def _options(self) -> Options:
        config = self._config
        return Options(
            strict_model=config.strict_model,
            strict_max_tokens=config.strict_max_tokens,
            body_limit=config.max_body,
            profile=config.profile,
            profiles=config.profiles,
            volatile=config.volatile_rules,
            hosts=self._hosts(),
            origins=config.allow_origin,
        )

    def _hosts(self) -> tuple[str, ...]:
        """Names the server answers to; none: all.

        Without keys a page in a browser on this machine could reach it under a name of its own.
        """
        allowed = self._config.allow_host
        if "*" in allowed or (self._keys.required and not allowed):
            return ()
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return (*Options().hosts, host, *allowed)


class _Uvicorn(uvicorn.Server):
    """Says when it listens, and ends the engine's requests along with the connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        serving: Serving,
        grace: float,
        announce: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._serving = serving
        self._grace = grace
        self._announce = announce
        self._hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A second signal: not uvicorn's own way, which breaks off what it can't wait for.
        self._hurried = self.should_exit
        super().handle_exit(signal.SIGTERM, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        await ending

    async def _end(self) -> None:
        """End the engine's requests, and then connections that don't close by themselves."""
        draining = asyncio.create_task(self._serving.drain(self._grace))
        seconds, left = 0.1, self._grace + _CLOSING_SECONDS
        while self.server_state.connections and left > 0:
            if self._hurried:
                left = min(left, _CLOSING_SECONDS)
            if left <= _CLOSING_SECONDS:
                await self._serving.drain(0)
            await asyncio.sleep(seconds)
            left -= seconds
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await draining


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the address but takes no connections yet: nothing could answer them."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        taken = socket.socket(family, kind, protocol)
        try:
            # Else a restart would have to wait until the last connections are forgotten.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
        except OSError:
            taken.close()
            raise
    except (OSError, UnicodeError) as error:
        raise _address_error(host, port, error) from error
    return taken


def _address_error(host: str, port: int, error: OSError | UnicodeError) -> AddressError:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return AddressError(f"port {port} of {host} is in use: choose another with --port")
    if number == errno.EACCES:
        return AddressError(f"port {port} needs rights you don't have: choose one above 1023")
    if number == errno.EADDRNOTAVAIL or not isinstance(number, int) or number < 0:
        return AddressError(f"{host!r} is no address of this machine: use 127.0.0.1 or 0.0.0.0")
    return AddressError(f"can't listen on {host} port {port}: {os.strerror(number)}")
