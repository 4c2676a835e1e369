from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MetadataRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class MetadataChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("ranges", "piece_bytes")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    piece_bytes: int
    def __init__(self, ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("name", "offset", "length")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    length: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("range", "file_bytes", "offset", "data", "is_missing")
    RANGE_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_MISSING_FIELD_NUMBER: _ClassVar[int]
    range: int
    file_bytes: int
    offset: int
    data: bytes
    is_missing: bool
    def __init__(self, range: _Optional[int] = ..., file_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., is_missing: _Optional[bool] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("node", "models", "problem")
    NODE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    node: str
    models: _containers.RepeatedCompositeFieldContainer[ModelReport]
    problem: str
    def __init__(self, node: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelReport, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class ModelReport(_message.Message):
    __slots__ = ("model", "state", "code", "reason", "version", "active", "epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: str
    code: str
    reason: str
    version: str
    active: str
    epoch: int
    def __init__(self, model: _Optional[str] = ..., state: _Optional[str] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ..., version: _Optional[str] = ..., active: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReportAnswer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("request", "token")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    token: str
    def __init__(self, request: _Optional[bytes] = ..., token: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    def __init__(self, request: _Optional[bytes] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...
