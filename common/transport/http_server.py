"""The Open Inference Protocol over HTTP for a data plane, on TCP and a Unix socket.

Thin: a handler parses, calls, renders. Errors become JSON with the status of `status.py` in one middleware; a client
that disconnects cancels its handler, and with it the call below.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from common.errors import ConfigError
from common.request import Context
from common.serving.catalog import ModelState
from common.serving.dataplane import DataPlane
from common.serving.statistics import Statistics
from common.transport import http_classify, oip, oip_config, oip_json, oip_statistics, openapi
from common.transport.headers import REQUEST_ID, Said, joined, read_context, write_stamp
from common.transport.http_body import read_body
from common.transport.http_infer import InferProtocol, infer
from common.transport.listen import DRAIN_S, MAX_BODY_BYTES, Listening, cannot_listen
from common.transport.status import status_of
from common.transport.tenants import Caller, TenantOptions, Tenants, tenants_of
from common.transport.unix_socket import SocketFile, claim

_log = logging.getLogger(__name__)
_wire_log = logging.getLogger(f"{__name__}.wire")
_CONTINUE = "100-continue"
_BACKLOG = 100  # as asyncio's
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Tensors compress badly and at a price, so only who names one coding gets it: that is a wish, and what stock clients
# send for it. A list of codings is what HTTP libraries send by themselves.
_CODINGS = {"gzip": web.ContentCoding.gzip, "deflate": web.ContentCoding.deflate}
_COMPRESSED_HERE_BYTES = 16 << 10  # larger answers are compressed off the event loop

_CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)
# What probes and scrapers ask for, and what the API looks like: no key is needed.
_OPEN = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics", openapi.PATH})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@_wire_log.addFilter
def _is_our_fault(record: logging.LogRecord) -> bool:
    """A stranger's bytes that are no HTTP are answered; a traceback for each would let them fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


@contextlib.asynccontextmanager
async def serve_http(
    dataplane: DataPlane,
    *,
    host: str = "127.0.0.1",
    port: int | None = 0,
    uds: Path | None = None,
    metrics: Callable[[], bytes] = bytes,
    statistics: Statistics | None = None,
    tenants: Sequence[TenantOptions] = (),
    drain_s: float = DRAIN_S,
) -> AsyncIterator[Listening]:
    """Serves until the context is left, then waits up to `drain_s` for the calls in progress.

    `port` None: no TCP. `tenants`: whose keys are good. Raises `ConfigError` when an address cannot be had.
    """
    keys = tenants_of(tenants)
    runner = web.AppRunner(
        http_app(dataplane, metrics, statistics, keys),
        handler_cancellation=True,
        auto_decompress=False,  # `http_body` does, within limits
        access_log=None,
        logger=_wire_log,
        shutdown_timeout=drain_s,
    )
    await runner.setup()
    _refuse_expectations(runner)
    loop = asyncio.get_running_loop()
    plain: set[InferProtocol] = set()  # connections that have only seen plain infer calls
    listening: list[asyncio.Server] = []
    addresses: list[str] = []
    bound = 0
    file: SocketFile | None = None

    def connection() -> InferProtocol:
        assert runner.server is not None
        return InferProtocol(dataplane, keys, runner.server(), plain)

    try:
        if port is not None:
            listening.append(await _started(loop.create_server(connection, host, port), f"{host}:{port}"))
            bound = listening[0].sockets[0].getsockname()[1]
            addresses.append(f"http://{f'[{host}]' if ':' in host else host}:{bound}")
        if uds is not None:
            sock, file = _unix_socket(uds)
            listening.append(await _started(loop.create_unix_server(connection, sock=sock), str(uds)))
            addresses.append(f"http+unix://{uds}")
        yield Listening(port=bound, addresses=tuple(addresses))
    finally:
        if file is not None:
            file.remove()
        for server in listening:
            server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await asyncio.gather(*(one.drain() for one in list(plain)))
        await runner.cleanup()


def http_app(
    dataplane: DataPlane,
    metrics: Callable[[], bytes],
    statistics: Statistics | None,
    tenants: Tenants,
) -> web.Application:
    middlewares = [_errors_as_json, _with_caller(tenants), _possible_names]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
    routes = _Routes(dataplane, metrics, statistics)
    app.router.add_get("/v2", routes.server)
    app.router.add_get("/v2/health/live", routes.live)
    app.router.add_get("/v2/health/ready", routes.ready)
    app.router.add_get("/v2/models/stats", routes.statistics)
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        app.router.add_post(f"{model}/infer", routes.infer)  # first: routes are tried in this order
        app.router.add_get(model, routes.model)
        app.router.add_get(f"{model}/ready", routes.model_ready)
        app.router.add_get(f"{model}/config", routes.model_config)
        app.router.add_get(f"{model}/stats", routes.statistics)
        app.router.add_post(f"{model}/classify", routes.classify)
    app.router.add_get("/v2/repository/index", routes.index)
    app.router.add_post("/v2/repository/index", routes.index)
    app.router.add_post("/v2/repository/models/{model}/load", routes.load)
    app.router.add_post("/v2/repository/models/{model}/unload", routes.unload)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get(openapi.PATH, routes.openapi)
    _add_refusals(app.router)
    return app


def _add_refusals(router: web.UrlDispatcher) -> None:
    """The extensions that stock clients know and that we do not have: an error that says so, not an unknown path."""
    refuse = _refusing(oip.NO_SHARED_MEMORY)
    for memory in ("/v2/systemsharedmemory", "/v2/cudasharedmemory"):
        for region in (memory, f"{memory}/region/{{region}}"):
            router.add_get(f"{region}/status", refuse)
            router.add_post(f"{region}/unregister", refuse)
        router.add_post(f"{memory}/region/{{region}}/register", refuse)
    for path, text in (
        ("/v2/trace/setting", oip.NO_TRACE_SETTINGS),
        ("/v2/models/{model}/trace/setting", oip.NO_TRACE_SETTINGS),
        ("/v2/logging", oip.NO_LOG_SETTINGS),
    ):
        router.add_get(path, _refusing(text))
        router.add_post(path, _refusing(text))


def _refusing(text: str) -> Handler:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        return _error(400, text, {})

    return refuse


def _refuse_expectations(runner: web.AppRunner) -> None:
    """Asked for before any route is: the library's own answer to what is no text would be a 500."""
    server = runner.server
    assert server is not None
    handle = server.request_handler

    async def guarded(request: web.BaseRequest) -> web.StreamResponse:
        expected = request.headers.get("Expect", _CONTINUE)
        if expected.lower() != _CONTINUE:
            return _error(417, f"Expect: {expected[:40]!r} is not met; accepted: {_CONTINUE}, or no such header", {})
        return await handle(request)

    server.request_handler = guarded


class _Routes:
    def __init__(self, dataplane: DataPlane, metrics: Callable[[], bytes], statistics: Statistics | None) -> None:
        self._dataplane, self._metrics, self._statistics = dataplane, metrics, statistics

    async def server(self, _request: web.Request) -> web.Response:
        version = oip.server_version()
        return _json({"name": self._dataplane.name, "version": version, "extensions": list(oip.EXTENSIONS)})

    async def live(self, _request: web.Request) -> web.Response:
        return _json({"live": True})

    async def ready(self, _request: web.Request) -> web.Response:
        return _readiness({"ready": self._dataplane.is_ready()})

    async def model(self, request: web.Request) -> web.Response:
        metadata = await self._dataplane.catalog.metadata(*_model(request))
        return _json(oip_json.render_metadata(metadata))

    async def model_ready(self, request: web.Request) -> web.Response:
        model, version = _model(request)
        is_ready = await self._dataplane.catalog.is_model_ready(model, version)
        return _readiness({"name": model, "ready": is_ready})

    async def model_config(self, request: web.Request) -> web.Response:
        metadata = await self._dataplane.catalog.metadata(*_model(request))
        return _json(oip_config.render(metadata))

    async def statistics(self, request: web.Request) -> web.Response:
        model, version = request.match_info.get("model", ""), request.match_info.get("version")
        entries = await oip_statistics.read(self._dataplane.catalog, self._statistics, model, version)
        return _json({"model_stats": entries})

    async def infer(self, request: web.Request) -> web.Response:
        data, (model, version) = await read_body(request), _model(request)
        headers = joined(request.headers.items())
        content, stamp, form = await infer(self._dataplane, model, version or "", headers, data, request[_CALLER])
        answer = web.Response(
            body=content, headers=form | write_stamp(stamp), zlib_executor_size=_COMPRESSED_HERE_BYTES
        )
        if coding := _CODINGS.get(request.headers.get("Accept-Encoding", "").strip().lower()):
            answer.enable_compression(coding)
        return answer

    async def classify(self, request: web.Request) -> web.Response:
        top = http_classify.top_of(request)
        context = _context(request)
        pictures = await http_classify.read_pictures(request)
        call = http_classify.classify_request(request.match_info["model"], pictures, top, context)
        response = await self._dataplane.infer(call)
        answer = http_classify.render_classes(response, len(pictures))
        return _json(answer, headers=write_stamp(response.stamp) | {REQUEST_ID: context.id})

    async def index(self, request: web.Request) -> web.Response:
        only_ready = oip_json.parse_flag(await read_body(request), "ready")
        index = await self._dataplane.catalog.index()
        if only_ready:
            index = [model for model in index if model.state is ModelState.READY]
        return _json(oip_json.render_index(index))

    async def load(self, request: web.Request) -> web.Response:
        oip.refuse_load_parameters(oip_json.parse_parameters(await read_body(request)))
        await self._dataplane.load(request.match_info["model"])
        return _json({})

    async def unload(self, request: web.Request) -> web.Response:
        oip_json.parse_parameters(await read_body(request))
        await self._dataplane.catalog.unload(request.match_info["model"])
        return _json({})

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": _METRICS_TYPE})

    async def openapi(self, _request: web.Request) -> web.Response:
        return web.Response(body=openapi.document(), content_type="application/json")


async def _last_words(request: web.Request, answer: web.Response) -> web.Response:
    """The connection ends with the answer: what is still missing of the body is not waited for."""
    answer.force_close()
    await answer.prepare(request)
    await answer.write_eof()
    request.protocol.force_close()
    return answer


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _error(413, f"the body is larger than {MAX_BODY_BYTES} bytes", {})
    except web.HTTPUnsupportedMediaType as exc:
        return _error(415, exc.text or exc.reason, {"Accept-Encoding": exc.headers["Accept-Encoding"]})
    except web.HTTPRequestTimeout as exc:
        return await _last_words(request, _error(408, exc.text or exc.reason, {}))
    except web.HTTPException as exc:
        headers = {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else {}
        return _error(exc.status, f"{request.method} {request.path}: {exc.reason}", headers)
    except web.RequestPayloadError as exc:
        return _error(400, f"the body cannot be read: {' '.join(str(exc).split())}", {})
    except ConnectionError:
        raise  # the client is gone: nobody to answer
    except Exception as exc:
        status = status_of(exc)
        if not status.is_ours:
            _log.exception("%s %s failed", request.method, request.path)
        return _error(status.http, status.text, status.headers)


def _with_caller(tenants: Tenants) -> Any:
    """Who calls, for the handlers; who shows no key where one is needed gets no further, and his body is not read."""

    @web.middleware
    async def with_caller(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN:
            peer = request.get_extra_info("socket")
            is_local = peer is not None and peer.family == socket.AF_UNIX
            request[_CALLER] = tenants.caller(request.headers, is_local=is_local)
        return await handler(request)

    return with_caller


@web.middleware
async def _possible_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    oip.check_model(request.match_info.get("model", ""), request.match_info.get("version", ""))
    return await handler(request)


def _context(request: web.Request) -> Context:
    said = Said(version=request.match_info.get("version", ""))
    return read_context(joined(request.headers.items()), said, time.monotonic(), caller=request[_CALLER])


def _model(request: web.Request) -> tuple[str, str | None]:
    return request.match_info["model"], request.match_info.get("version")


def _readiness(answer: dict[str, Any]) -> web.Response:
    return _json(answer) if answer["ready"] else _json(answer, status=503, headers={"Retry-After": "1"})


def _error(status: int, text: str, headers: dict[str, str]) -> web.Response:
    """`text` may quote what a caller sent, and that need not be Unicode."""
    said = text.encode("utf-8", "backslashreplace").decode()
    return _json({"error": said}, status=status, headers=headers)


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=oip_json.dump(value), status=status, headers=(headers or {}) | {"Content-Type": "application/json"}
    )


def _unix_socket(path: Path) -> tuple[socket.socket, SocketFile]:
    sock = socket.socket(socket.AF_UNIX)

    def listen(at: Path) -> None:
        sock.setblocking(False)
        sock.bind(str(at))
        sock.listen(_BACKLOG)

    try:
        return sock, claim("http", path, listen)
    except ConfigError:
        sock.close()
        raise


async def _started(starting: Awaitable[asyncio.Server], address: str) -> asyncio.Server:
    try:
        return await starting
    except OSError as exc:
        raise cannot_listen("http", address, exc) from exc
