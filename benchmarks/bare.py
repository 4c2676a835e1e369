"""The floors: an HTTP echo in aiohttp and a gRPC echo in grpc.aio, both on uvloop, with nothing else in them.

HTTP: a JSON body is read and written with orjson, any other goes back as it came. gRPC: the message is parsed, and its
raw tensors go back in an answer. `bare.py http|grpc --endpoint-file FILE [--uds PATH]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path

import grpc
import orjson
import uvloop
from aiohttp import web

from common.transport.proto import oip_pb2

MAX_BYTES = 128 << 20


async def http_echo(request: web.Request) -> web.Response:
    body = await request.read()
    if request.content_type == "application/json":
        body = orjson.dumps(orjson.loads(body))
    return web.Response(body=body, content_type=request.content_type)


async def grpc_echo(request: oip_pb2.ModelInferRequest, _context: object) -> oip_pb2.ModelInferResponse:
    answer = oip_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    for tensor in request.inputs:
        answer.outputs.add(name="y", datatype=tensor.datatype, shape=tensor.shape)
    answer.raw_output_contents.extend(request.raw_input_contents)
    return answer


async def serve_http(uds: Path) -> tuple[str, object]:
    app = web.Application(client_max_size=MAX_BYTES)
    app.router.add_post("/v2/models/{model}/infer", http_echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await web.UnixSite(runner, uds).start()
    port = next(address[1] for address in runner.addresses if not isinstance(address, str))
    return f"http://127.0.0.1:{port}", runner


async def serve_grpc(uds: Path) -> tuple[str, object]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_BYTES)])
    handler = grpc.unary_unary_rpc_method_handler(
        grpc_echo,
        request_deserializer=oip_pb2.ModelInferRequest.FromString,
        response_serializer=oip_pb2.ModelInferResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_insecure_port(f"unix:{uds}")
    await server.start()
    return f"127.0.0.1:{port}", server


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("http", "grpc"))
    parser.add_argument("--uds", type=Path, required=True)
    parser.add_argument("--endpoint-file", type=Path, required=True)
    arguments = parser.parse_args()
    serve = serve_http if arguments.kind == "http" else serve_grpc
    address, _kept = await serve(arguments.uds)
    partial = arguments.endpoint_file.with_suffix(".tmp")
    partial.write_text(json.dumps({"pid": os.getpid(), arguments.kind: address}))
    partial.replace(arguments.endpoint_file)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


if __name__ == "__main__":
    uvloop.run(main())
