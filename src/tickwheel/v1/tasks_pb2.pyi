import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[State]
    STATE_DELAY: _ClassVar[State]
    STATE_READY: _ClassVar[State]
    STATE_RUNNING: _ClassVar[State]
    STATE_FINISHED: _ClassVar[State]
    STATE_FAILED: _ClassVar[State]
    STATE_CANCELLED: _ClassVar[State]

class OnConflict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_CONFLICT_UNSPECIFIED: _ClassVar[OnConflict]
    ON_CONFLICT_REJECT: _ClassVar[OnConflict]
    ON_CONFLICT_REPLACE: _ClassVar[OnConflict]
    ON_CONFLICT_KEEP: _ClassVar[OnConflict]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_FINISHED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_PROGRESS: _ClassVar[Outcome]
STATE_UNSPECIFIED: State
STATE_DELAY: State
STATE_READY: State
STATE_RUNNING: State
STATE_FINISHED: State
STATE_FAILED: State
STATE_CANCELLED: State
ON_CONFLICT_UNSPECIFIED: OnConflict
ON_CONFLICT_REJECT: OnConflict
ON_CONFLICT_REPLACE: OnConflict
ON_CONFLICT_KEEP: OnConflict
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_FINISHED: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_PROGRESS: Outcome

class Task(_message.Message):
    __slots__ = ("id", "service", "payload", "key", "state", "due_at", "shard", "attempt", "failures", "max_attempts", "created_at", "updated_at", "result", "error", "priority", "timeout", "deadline", "tags", "replay_of", "replayed_as", "node", "epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_OF_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_AS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    service: str
    payload: str
    key: str
    state: State
    due_at: _timestamp_pb2.Timestamp
    shard: int
    attempt: int
    failures: int
    max_attempts: int
    created_at: _timestamp_pb2.Timestamp
    updated_at: _timestamp_pb2.Timestamp
    result: str
    error: str
    priority: int
    timeout: _duration_pb2.Duration
    deadline: _timestamp_pb2.Timestamp
    tags: _containers.RepeatedScalarFieldContainer[str]
    replay_of: str
    replayed_as: str
    node: str
    epoch: int
    def __init__(self, id: _Optional[str] = ..., service: _Optional[str] = ..., payload: _Optional[str] = ..., key: _Optional[str] = ..., state: _Optional[_Union[State, str]] = ..., due_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., shard: _Optional[int] = ..., attempt: _Optional[int] = ..., failures: _Optional[int] = ..., max_attempts: _Optional[int] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., updated_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., result: _Optional[str] = ..., error: _Optional[str] = ..., priority: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tags: _Optional[_Iterable[str]] = ..., replay_of: _Optional[str] = ..., replayed_as: _Optional[str] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("service", "payload", "delay", "due_at", "key", "on_conflict", "max_attempts", "priority", "timeout", "deadline", "tags", "idempotency_key")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ON_CONFLICT_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    service: str
    payload: str
    delay: _duration_pb2.Duration
    due_at: _timestamp_pb2.Timestamp
    key: str
    on_conflict: OnConflict
    max_attempts: int
    priority: int
    timeout: _duration_pb2.Duration
    deadline: _timestamp_pb2.Timestamp
    tags: _containers.RepeatedScalarFieldContainer[str]
    idempotency_key: str
    def __init__(self, service: _Optional[str] = ..., payload: _Optional[str] = ..., delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., due_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., key: _Optional[str] = ..., on_conflict: _Optional[_Union[OnConflict, str]] = ..., max_attempts: _Optional[int] = ..., priority: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tags: _Optional[_Iterable[str]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("task", "created", "repeated_request")
    TASK_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_REQUEST_FIELD_NUMBER: _ClassVar[int]
    task: Task
    created: bool
    repeated_request: bool
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., created: _Optional[bool] = ..., repeated_request: _Optional[bool] = ...) -> None: ...

class SubmitBatchRequest(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[SubmitRequest]
    def __init__(self, tasks: _Optional[_Iterable[_Union[SubmitRequest, _Mapping]]] = ...) -> None: ...

class SubmitBatchResponse(_message.Message):
    __slots__ = ("items", "stored", "refused")
    class Item(_message.Message):
        __slots__ = ("task", "problem")
        TASK_FIELD_NUMBER: _ClassVar[int]
        PROBLEM_FIELD_NUMBER: _ClassVar[int]
        task: StoredTask
        problem: Problem
        def __init__(self, task: _Optional[_Union[StoredTask, _Mapping]] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SubmitBatchResponse.Item]
    stored: int
    refused: int
    def __init__(self, items: _Optional[_Iterable[_Union[SubmitBatchResponse.Item, _Mapping]]] = ..., stored: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class StoredTask(_message.Message):
    __slots__ = ("id", "state", "due_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: State
    due_at: _timestamp_pb2.Timestamp
    def __init__(self, id: _Optional[str] = ..., state: _Optional[_Union[State, str]] = ..., due_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("code", "detail", "holder")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    code: str
    detail: str
    holder: str
    def __init__(self, code: _Optional[str] = ..., detail: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: Task
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("state", "service", "key", "due_before", "tags", "cursor", "limit", "due_after")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DUE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DUE_AFTER_FIELD_NUMBER: _ClassVar[int]
    state: State
    service: str
    key: str
    due_before: _timestamp_pb2.Timestamp
    tags: _containers.RepeatedScalarFieldContainer[str]
    cursor: str
    limit: int
    due_after: _timestamp_pb2.Timestamp
    def __init__(self, state: _Optional[_Union[State, str]] = ..., service: _Optional[str] = ..., key: _Optional[str] = ..., due_before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tags: _Optional[_Iterable[str]] = ..., cursor: _Optional[str] = ..., limit: _Optional[int] = ..., due_after: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("tasks", "next_cursor")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    next_cursor: str
    def __init__(self, tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("won", "state")
    WON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    won: bool
    state: State
    def __init__(self, won: _Optional[bool] = ..., state: _Optional[_Union[State, str]] = ...) -> None: ...

class RescheduleRequest(_message.Message):
    __slots__ = ("id", "delay", "due_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    delay: _duration_pb2.Duration
    due_at: _timestamp_pb2.Timestamp
    def __init__(self, id: _Optional[str] = ..., delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., due_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RescheduleResponse(_message.Message):
    __slots__ = ("won", "state")
    WON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    won: bool
    state: State
    def __init__(self, won: _Optional[bool] = ..., state: _Optional[_Union[State, str]] = ...) -> None: ...

class FeedbackRequest(_message.Message):
    __slots__ = ("id", "outcome", "attempt", "epoch", "result", "error", "no_retry")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NO_RETRY_FIELD_NUMBER: _ClassVar[int]
    id: str
    outcome: Outcome
    attempt: int
    epoch: int
    result: str
    error: str
    no_retry: bool
    def __init__(self, id: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., result: _Optional[str] = ..., error: _Optional[str] = ..., no_retry: _Optional[bool] = ...) -> None: ...

class FeedbackResponse(_message.Message):
    __slots__ = ("won", "state")
    WON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    won: bool
    state: State
    def __init__(self, won: _Optional[bool] = ..., state: _Optional[_Union[State, str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: Task
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ...) -> None: ...
