import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallRequest(_message.Message):
    __slots__ = ("task_id", "service", "payload", "attempt", "due_at", "epoch")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    service: str
    payload: str
    attempt: int
    due_at: _timestamp_pb2.Timestamp
    epoch: int
    def __init__(self, task_id: _Optional[str] = ..., service: _Optional[str] = ..., payload: _Optional[str] = ..., attempt: _Optional[int] = ..., due_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class CallResponse(_message.Message):
    __slots__ = ("accepted", "result")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    result: str
    def __init__(self, accepted: _Optional[bool] = ..., result: _Optional[str] = ...) -> None: ...
