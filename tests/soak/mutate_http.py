"""Valid HTTP calls, and what becomes of them: JSON trees, headers, framing, binary tails, uploads."""

from __future__ import annotations

import copy
import gzip
import json
import random
from dataclasses import dataclass
from typing import Any

from tests.hostile import picture
from tests.soak.hostile_bytes import HEADERS, MODELS, TEXTS, broken, maybe_broken

WIDTHS = {"FP32": 4, "FP64": 8, "FP16": 2, "BOOL": 1, "INT8": 1, "INT64": 8, "UINT8": 1, "UINT64": 8, "BYTES": 5}
PICTURES = (picture("PNG"), picture("JPEG"))
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**33, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0,
    1e38, 1e39, 1e308, float("nan"), float("inf"), "", "x", "linear", "FP32", "BF16", "BYTES", "fp32", "\u0000",
    "\ud800", "é" * 40, "x" * 3000, "1", "-1", [], {}, [[]], [1], [-1], [0, 2], [2**33, 2**33], [2**63], [1.5],
    [1] * 40, ["a"], {"b64": "AAAA"}, {"a": 1}, [None], [[1, 2], [3]],
)  # fmt: skip
FRAMING = ("Content-Length", "Transfer-Encoding", "Connection", "Upgrade")


@dataclass(frozen=True, slots=True)
class HttpInput:
    """Bytes for an HTTP socket. `is_framed`: one whole request, so that an answer is due on this connection."""

    data: bytes
    is_framed: bool


@dataclass(slots=True)
class _Http:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def bytes(self, length: str | None) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers)]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + self.body


def http_input(rng: random.Random) -> HttpInput:
    call = rng.choice((_json_infer, _json_infer, _binary_infer, _binary_infer, _classify, _other))(rng)
    call.headers.insert(0, ("Host", "node"))
    is_framed = True
    for _ in range(rng.randint(0, 2)):
        is_framed &= rng.choice((_change_header, _change_header, _change_path, _change_body, _change_framing))(
            rng, call
        )
    length: str | None = str(len(call.body))
    if any(name == "Transfer-Encoding" for name, _ in call.headers):
        length, is_framed = None, False
    elif rng.random() < 0.03:
        length, is_framed = rng.choice((None, "-1", "x", "9" * 20, str(len(call.body) + 5), "0", "1")), False
    data = call.bytes(length)
    if rng.random() < 0.03:
        data, is_framed = broken(rng, data), False
    return HttpInput(data, is_framed)


def _json_infer(rng: random.Random) -> _Http:
    message: Any = _message(rng)
    path = _infer_path(rng, message)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        message = _mutated(rng, message)
    body = json.dumps(message, indent=rng.choice((None, None, 1))).encode("utf-8", "surrogatepass")
    return _Http("POST", path, [("Content-Type", "application/json")], body)


def _binary_infer(rng: random.Random) -> _Http:
    message, tail = _message(rng), b""
    path = _infer_path(rng, message)
    for one in message["inputs"]:
        one.pop("data")
        raw = rng.randbytes(2 * WIDTHS[one["datatype"]]) if rng.random() < 0.8 else rng.randbytes(rng.randint(0, 40))
        if one["datatype"] in ("BYTES", "BOOL"):
            raw = b"\x01\x00\x00\x00a" * 2 if one["datatype"] == "BYTES" else b"\x01\x00"
        one["parameters"] = {"binary_data_size": len(raw)}
        tail += raw
    for _ in range(rng.randint(0, 2)):
        message = _mutated(rng, message)
    head = json.dumps(message).encode("utf-8", "surrogatepass")
    size = str(len(head)) if rng.random() < 0.85 else str(len(head) + rng.randint(-9, 40))
    return _Http("POST", path, [("Inference-Header-Content-Length", size)], head + tail)


def _classify(rng: random.Random) -> _Http:
    data = rng.choice(PICTURES)
    if rng.random() < 0.7:
        data = broken(rng, data)
    query = rng.choice(
        ("", "", "?top=1", "?top=1", "?top=3", "?top=2", "?top=x", "?top=0", "?top=99999", "?top=-1", "?top=%00")
    )
    path = f"/v2/models/{rng.choice(('pictures', 'pictures', 'linear', 'nothing'))}/classify{query}"
    if rng.random() < 0.5:
        return _Http("POST", path, [("Content-Type", rng.choice(("image/png", "image/jpeg", "text/plain")))], data)
    form = b'--b\r\nContent-Disposition: form-data; name="image"; filename="p"\r\n\r\n' + data + b"\r\n--b--\r\n"
    return _Http("POST", path, [("Content-Type", "multipart/form-data; boundary=b")], maybe_broken(rng, form, 0.3))


def _other(rng: random.Random) -> _Http:
    model = f"/v2/models/{_model(rng)}"
    gets = (
        "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/metrics", "/v2/repository/index", model,
        f"{model}/versions/1", f"{model}/versions/9", f"{model}/ready", f"{model}/config", f"{model}/stats",
        "/v2/logging",
    )  # fmt: skip
    if rng.random() < 0.5:
        return _Http("GET", rng.choice(gets), [], b"")
    posts = (
        "/v2/repository/index",
        f"/v2/repository/models/{_model(rng)}/load",
        f"/v2/repository/models/{_model(rng)}/unload",
    )
    message: Any = _mutated(rng, {"ready": True, "parameters": {"unload_dependents": False}})
    return _Http("POST", rng.choice(posts), [], json.dumps(message).encode("utf-8", "surrogatepass"))


def _message(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(("FP32", "FP64", "FP16", "BOOL", "INT8", "INT64", "UINT8", "UINT64", "BYTES"))
    data: list[Any] = [True, False] if kind == "BOOL" else ["a", "é"] if kind == "BYTES" else [1, 2]
    one = {"name": "x", "shape": [1, 2], "datatype": kind, "data": data}
    message: dict[str, Any] = {"id": "7", "inputs": [one], "parameters": {"priority": 2}}
    if rng.random() < 0.4:
        name = rng.choice(("y", "y", "y", "nope"))
        parameters = rng.choice(
            ({"binary_data": True}, {"binary_data": True}, {}, {"classification": 2}, {"shared_memory_region": "r"})
        )
        message["outputs"] = [{"name": name, "parameters": parameters}]
    return message


def _infer_path(rng: random.Random, message: dict[str, Any]) -> str:
    right = f"same-{message['inputs'][0]['datatype'].lower()}"
    version = rng.choice(("", "", "", "/versions/1", "/versions/9"))
    return f"/v2/models/{right if rng.random() < 0.8 else _model(rng)}{version}/infer"


def _model(rng: random.Random) -> str:
    return rng.choice((*MODELS, *MODELS, "nothing", "%00", "..", "x" * 300, "%C3%A9", "a%2Fb"))


def _mutated(rng: random.Random, value: Any) -> Any:
    """The JSON tree with one thing changed."""
    root = [copy.deepcopy(value)]
    spots: list[tuple[Any, Any]] = []
    _walk(root, spots)
    holder, key = rng.choice(spots)
    match rng.randint(0, 7):
        case 0 if holder is not root:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("name", "data", "shape", "x", "parameters", "", "é"))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.insert(rng.randint(0, len(holder)), copy.deepcopy(holder[key]))
        case 3:
            holder[key] = [holder[key]]
        case 4 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * rng.choice((-1, 2, 1000, 2**31, 0.5)) + rng.choice((0, 1, -1))
        case _:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return root[0]


def _walk(value: Any, spots: list[tuple[Any, Any]]) -> None:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        spots.append((value, key))
        _walk(value[key], spots)


def _change_header(rng: random.Random, call: _Http) -> bool:
    name, value = rng.choice(HEADERS), rng.choice(TEXTS)
    if name == "Content-Encoding" and rng.random() < 0.5:
        value, call.body = "gzip", maybe_broken(rng, gzip.compress(call.body), 0.5)
    call.headers = [(n, v) for n, v in call.headers if n != name or rng.random() < 0.2]
    call.headers.append((name, value))
    return name not in ("Expect", "Host") and value.isascii()


def _change_path(rng: random.Random, call: _Http) -> bool:
    if rng.random() < 0.3:
        call.method = rng.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW", "post", ""))
    else:
        at = rng.randint(1, len(call.path))
        call.path = (
            call.path[:at]
            + rng.choice(("/", "%", "%zz", "//", "?", "#", "..", " ", "\x00", "é", "x" * 9000))
            + call.path[at:]
        )
    return False


def _change_body(rng: random.Random, call: _Http) -> bool:
    call.body = broken(rng, call.body)
    return True


def _change_framing(rng: random.Random, call: _Http) -> bool:
    if rng.random() < 0.4:
        pieces = b"%x\r\n%b\r\n0\r\n\r\n" % (len(call.body), call.body)
        call.headers.append(("Transfer-Encoding", "chunked"))
        call.body = maybe_broken(rng, pieces, 0.5)
    else:
        call.headers.append((rng.choice(FRAMING), rng.choice(TEXTS)))
    return False
