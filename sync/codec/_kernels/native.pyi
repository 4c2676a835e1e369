from typing import Any, NewType

from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview | NDArray[Any]
Tables = NewType("Tables", object)

def tables(classes: int, bins: int, tokens: int, class_frequencies: Buffer, token_frequencies: Buffer, /) -> Tables: ...
def ctx_decode(
    payload: Buffer, base: Buffer, width: int, mantissa: int, row: int, bin_map: Buffer, tables: Tables, /
) -> bytes: ...
def ctx_encode(
    raw: Buffer,
    base: Buffer,
    width: int,
    mantissa: int,
    row: int,
    classes: Buffer,
    bin_map: Buffer,
    tables: Tables,
    lanes_log2: int,
    /,
) -> bytes | None: ...
def ctx_tokens(raw: Buffer, base: Buffer, width: int, mantissa: int, bin_map: Buffer, /) -> tuple[bytes, bytes]: ...
def ctx_row_histograms(tokens: Buffer, bins: Buffer, row: int, bin_count: int, /) -> bytes: ...
def ctx_counts(
    tokens: Buffer,
    bins: Buffer,
    row: int,
    row_classes: Buffer,
    classes: int,
    bin_count: int,
    token_count: int,
    /,
) -> bytes: ...
def ctx_row_costs(
    tokens: Buffer, bins: Buffer, row: int, costs: Buffer, classes: int, bin_count: int, token_count: int, /
) -> bytes: ...
def planes_diff(raw: Buffer, base: Buffer, width: int, mantissa: int, /) -> bytes: ...
def planes_undo(planes: Buffer, base: Buffer, width: int, mantissa: int, /) -> bytes: ...
def to_planes(raw: Buffer, width: int, /) -> bytes: ...
def from_planes(planes: Buffer, width: int, /) -> bytes: ...
def sparse_gather(raw: Buffer, base: Buffer, width: int, mantissa: int, /) -> bytes | None: ...
def sparse_apply(content: Buffer, base: Buffer, width: int, mantissa: int, /) -> bytes: ...
