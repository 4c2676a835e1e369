"""How large a message may be, and which ones take longer to read or write than an event loop has.

JSON, and in gRPC all but the raw contents, cost time and memory for each object in them, and their parsers let go of
nothing before they are through: they are bounded before they are parsed. Numbers in binary cost next to nothing,
however many. BYTES are objects, too, but are taken one by one, in a thread (`off_loop.py`).
"""

from __future__ import annotations

from common.errors import InvalidInput
from common.request import Response
from common.tensors import BYTES
from common.transport import oip
from common.transport.proto import oip_pb2 as pb

MAX_PARSED_BYTES = 16 << 20  # of an infer call's JSON, or of its gRPC message but for the raw contents
QUICK_BYTES = 256 << 10  # a few milliseconds' worth; the most of a call that brings no tensors
_QUICK_ELEMENTS = 16 << 10  # the same of BYTES in an answer
_MAX_FIELDS = 4 * oip.MAX_OBJECTS
_RAW = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_WIDTHS = {0: 0, 1: 8, 5: 4}  # by wire type: a varint has its own end, 2 says its length, others are not ours


def is_long_body(body: bytes, header_length: str | None) -> bool:
    """Of an infer call over HTTP: much JSON, or many BYTES (whose name an escape may hide)."""
    if len(body) <= QUICK_BYTES:
        return False
    has_size = header_length is not None and header_length.isascii() and header_length.isdigit()
    size = int(header_length[:15]) if header_length is not None and has_size else len(body)
    return size > QUICK_BYTES or b"BYTES" in (head := body[:size]) or b"\\" in head


def is_long_message(message: pb.ModelInferRequest) -> bool:
    """Of an infer call over gRPC: many typed contents, parameters or BYTES."""
    if max(len(message.inputs), len(message.outputs)) > oip.MAX_OBJECTS:
        return False  # refused at once
    described = sum(tensor.ByteSize() for tensors in (message.inputs, message.outputs) for tensor in tensors)
    raw = message.raw_input_contents
    return described > QUICK_BYTES or any(
        tensor.datatype == BYTES and len(data) > QUICK_BYTES for tensor, data in zip(message.inputs, raw, strict=False)
    )


def is_long_answer(response: Response) -> bool:
    """Many BYTES. Numbers are written as fast in this thread as in another."""
    return any(array.size > _QUICK_ELEMENTS and array.dtype.kind in "OSU" for array in response.outputs.values())


def check_message_size(kind: str, data: bytes) -> None:
    """Raises `InvalidInput` for a gRPC message (of the name `kind`) that is too large to be parsed."""
    if len(data) <= QUICK_BYTES:
        return
    if kind != pb.ModelInferRequest.DESCRIPTOR.name:
        raise InvalidInput("message", f"{len(data)} bytes", f"at most {QUICK_BYTES} of a {kind}")
    offset = fields = described = 0
    while offset < len(data):
        start = offset
        try:
            offset, is_raw = _field(data, offset)
        except IndexError:
            return  # broken off: so says the parser
        fields, described = fields + 1, described + (0 if is_raw else offset - start)
        if fields > _MAX_FIELDS:
            raise InvalidInput("message", f"more than {_MAX_FIELDS} fields", f"{oip.MAX_OBJECTS} inputs and outputs")
        if described > MAX_PARSED_BYTES:
            problem = f"more than {MAX_PARSED_BYTES} bytes beside raw_input_contents"
            raise InvalidInput("message", problem, "large tensors as raw_input_contents")


def _field(data: bytes, offset: int) -> tuple[int, bool]:
    """Where the field at `offset` ends, and whether it is raw contents. Raises IndexError where `data` ends first."""
    tag, offset = _varint(data, offset)
    kind = tag & 7
    if kind == 2:
        size, offset = _varint(data, offset)
        return offset + size, tag >> 3 == _RAW
    if kind not in _WIDTHS:
        raise InvalidInput("message", "not a ModelInferRequest", "a protobuf message of the protocol")
    if kind == 0:
        _, offset = _varint(data, offset)
    return offset + _WIDTHS[kind], False


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[offset]) & 0x80:
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if shift > 63:
            raise IndexError("a number of more than 64 bits")
    return value | byte << shift, offset + 1
