"""What both protocols' mutations draw from: names, hostile texts, and bytes that are flipped, cut and put in."""

from __future__ import annotations

import random

SAME = ("fp32", "fp64", "fp16", "bool", "int8", "int64", "uint8", "uint64", "bytes")
MODELS = ("linear", "pictures", *(f"same-{kind}" for kind in SAME))
TEXTS = (
    "", "0", "-1", "1", "4", "50", "99999999999", "1e3", "nan", "0x10", "1, 1", "x" * 400, "%", "%ff%00",
    "device_only", "any,any", "\xff\xfe", "gzip", "identity", "br", "chunked", "application/json",
    "multipart/form-data", "image/png", "realtime",
)  # fmt: skip
HEADERS = (
    "Inference-Header-Content-Length", "Content-Type", "Content-Encoding", "Accept-Encoding", "Expect",
    "x-outrider-deadline-ms", "Host", "x-outrider-priority", "x-outrider-privacy", "x-outrider-pin",
    "x-outrider-request-id", "x-outrider-reason", "traceparent", "Range",
)  # fmt: skip


def maybe_broken(rng: random.Random, data: bytes, chance: float) -> bytes:
    return broken(rng, data) if rng.random() < chance else data


def broken(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, max(0, len(out) - 1))
        match rng.randint(0, 3):
            case 0 if out:
                out[at] = rng.randint(0, 255)
            case 1:
                del out[at:]
            case 2:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                del out[at : at + rng.randint(1, 8)]
    return bytes(out)
