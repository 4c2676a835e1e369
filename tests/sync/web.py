"""Web servers that a store's folder lies behind: one that knows ranges, one that does not, and one that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.server
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

Behaviour = Callable[[bytes, socket.socket], None]  # the request's head, and where to answer


@dataclass
class Site:
    """Where a server is, and what it was asked: path and Range header."""

    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)


@contextlib.contextmanager
def static(folder: Path) -> Iterator[Site]:
    """aiohttp's static files, below /parameters/."""
    site, started = Site(), Future[int]()
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()

    @web.middleware
    async def noted(request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        site.asked.append((request.path, request.headers.get("range")))
        site.connections.add(request.transport)
        return await handler(request)  # type: ignore[misc,no-any-return]

    async def serve() -> None:
        app = web.Application(middlewares=[noted])
        app.router.add_static("/parameters/", folder)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        server = web.TCPSite(runner, "127.0.0.1", 0)
        await server.start()
        started.set_result(runner.addresses[0][1])
        await stopped.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="test-static")
    thread.start()
    try:
        site.url = f"http://127.0.0.1:{started.result(10)}/parameters"
        yield site
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()


@contextlib.contextmanager
def without_ranges(folder: Path) -> Iterator[Site]:
    """`python -m http.server`: the whole file whatever is asked for, HTTP/1.0."""
    site = Site()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append((self.path, self.headers.get("range")))
            with contextlib.suppress(ConnectionError):
                super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            site.url = f"http://127.0.0.1:{server.server_port}"
            yield site
        finally:
            server.shutdown()
            thread.join(10)


@contextlib.contextmanager
def scripted(*behaviours: Behaviour, tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Answers request after request as told, the last one again and again. A behaviour that returns leaves the
    connection open; one that raises `OSError` ends it."""
    site, steps, is_over = Site(), list(behaviours), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.02)
        host, port = server.getsockname()
        site.url = f"{'http' if tls is None else 'https'}://{host}:{port}"

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with tls.wrap_socket(connection, server_side=True) if tls else connection as connection:
                        connection.settimeout(5)
                        site.connections.add(connection)
                        while head := _head(connection):
                            site.asked.append((head.split()[1].decode(), _range(head)))
                            (steps.pop(0) if len(steps) > 1 else steps[0])(head, connection)

        thread = threading.Thread(target=serve, name="test-scripted")
        thread.start()
        try:
            yield site
        finally:
            is_over.set()
            thread.join(10)


def answer(status: str, body: bytes = b"", *headers: str) -> Behaviour:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return lambda head, connection: connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def _head(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(4096)
        if not more:
            return b""
        data += more
    return data


def _range(head: bytes) -> str | None:
    found = [line for line in head.decode().split("\r\n") if line.lower().startswith("range:")]
    return found[0].partition(":")[2].strip() if found else None
