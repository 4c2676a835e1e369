"""Element types by name: what a pattern of bits means to the codec. Names are numpy's where numpy has one.

A `Kind` says how wide the words are that differences are taken between, how many bits lie below their exponent (0: an
integer), and how many elements share how many bytes: packed and block-quantized types travel as bytes. What is not
listed travels as plain bytes too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    width: int  # bytes per word: 1, 2, 4, 8
    mantissa: int
    block: int = 1  # elements that share `block_bytes`
    block_bytes: int

    def bytes_of(self, elements: int) -> int:
        """Of a whole tensor; the last byte may be filled up."""
        return -(-elements * self.block_bytes // self.block)


_WORDS: Final = {  # (width, mantissa)
    "float64": (8, 52), "float32": (4, 23), "float16": (2, 10), "bfloat16": (2, 7),
    "float8_e4m3fn": (1, 3), "float8_e4m3fnuz": (1, 3), "float8_e5m2": (1, 2), "float8_e5m2fnuz": (1, 2),
    "float8_e8m0": (1, 0),  # an exponent alone: neighbouring numbers are neighbouring integers already
    "int64": (8, 0), "int32": (4, 0), "int16": (2, 0), "int8": (1, 0),
    "uint64": (8, 0), "uint32": (4, 0), "uint16": (2, 0), "uint8": (1, 0), "bool": (1, 0),
}  # fmt: skip
_PACKED: Final = {  # (elements, bytes)
    "int4": (2, 1), "uint4": (2, 1), "float4_e2m1": (2, 1), "int2": (4, 1), "uint2": (4, 1),
    "float6_e2m3": (4, 3), "float6_e3m2": (4, 3),
}  # fmt: skip
# The blocks of ggml: (elements, bytes), from the structs in ggml-common.h (gguf-py: GGML_QUANT_SIZES).
_GGML: Final = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q8_1": (32, 40),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "q8_k": (256, 292), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq3_xxs": (256, 98), "iq1_s": (256, 50),
    "iq4_nl": (32, 18), "iq3_s": (256, 110), "iq2_s": (256, 82), "iq4_xs": (256, 136), "iq1_m": (256, 56),
    "tq1_0": (256, 54), "tq2_0": (256, 66), "mxfp4": (32, 17), "nvfp4": (64, 36),
}  # fmt: skip

KINDS: Final[dict[str, Kind]] = {
    **{name: Kind(width=width, mantissa=bits, block_bytes=width) for name, (width, bits) in _WORDS.items()},
    **{name: Kind(width=1, mantissa=0, block=n, block_bytes=size) for name, (n, size) in (_PACKED | _GGML).items()},
    "complex64": Kind(width=4, mantissa=23, block_bytes=8),
    "complex128": Kind(width=8, mantissa=52, block_bytes=16),
}
