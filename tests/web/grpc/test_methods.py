"""Each method of the gRPC API, through the generated client: as over HTTP, in the same bounds."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tickwheel.v1 import tasks_pb2 as pb
from tickwheel.web import tasks as tasks_module
from tickwheel.web.app import Limits
from tickwheel.web.grpc import discovery as discovery_module
from tickwheel.web.grpc import requests as requests_module
from tickwheel.web.grpc import server as server_module
from tickwheel.web.grpc.discovery import REFLECTION
from tickwheel.web.grpc.methods import METHODS, SERVICE, WATCH
from tickwheel.web.grpc.statuses import status_of
from tickwheel.web.problems import STATUS
from web.grpc.frames import Peer
from web.serving import UNKNOWN_ID

pytestmark = pytest.mark.asyncio
Code = grpc.StatusCode
HOUR = timedelta(hours=1)
INFO = "ServerReflectionInfo"


class Refused:
    """The error of a call: its status, code, message and retry delay."""

    def __init__(self, error):
        self.status, self.message = error.code(), error.details()
        self.trailers = dict(error.trailing_metadata())
        self.code = self.trailers.get("tickwheel-code")
        details = status_pb2.Status.FromString(self.trailers["grpc-status-details-bin"])
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        self.retry_seconds = None
        for one in details.details:
            if one.Unpack(info):
                assert (info.reason, info.domain) == (self.code, "tickwheel")
                self.holder = dict(info.metadata).get("holder")
            elif one.Unpack(retry):
                self.retry_seconds = retry.retry_delay.seconds


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return Refused(caught.value)


async def submitted(stage, service="mail", delay=HOUR, **fields):
    response = await stage.stub.Submit(pb.SubmitRequest(service=service, delay=delay, **fields))
    return response.task


class TestSubmit:
    async def test_a_task_is_stored_with_all_its_fields(self, stage):
        due_at = datetime(2100, 1, 2, 3, 4, 5, 678_000, UTC)
        request = pb.SubmitRequest(
            service="mail", payload='{"ö": 1.10}', due_at=due_at, key="k", max_attempts=7,
            priority=-3, timeout=timedelta(seconds=9), deadline=due_at + HOUR, tags=["a", "b"],
        )  # fmt: skip
        answer = await stage.stub.Submit(request)
        assert (answer.created, answer.repeated_request) == (True, False)
        task = answer.task
        assert (task.service, task.payload, task.key) == ("mail", '{"ö": 1.10}', "k")
        assert (task.state, task.attempt, task.max_attempts) == (pb.STATE_DELAY, 0, 7)
        assert task.due_at.ToDatetime(UTC) == due_at
        assert task.deadline.ToDatetime(UTC) == due_at + HOUR
        assert (task.priority, task.timeout.ToSeconds(), list(task.tags)) == (-3, 9, ["a", "b"])
        assert not task.HasField("result")
        kept = await stage.scheduler.get(task.id)
        assert (kept.body, kept.key) == ('{"ö": 1.10}'.encode(), "k")

    async def test_a_payload_may_be_left_out(self, stage):
        assert (await submitted(stage)).payload == "null"

    async def test_a_key_that_is_taken_names_its_holder(self, stage):
        task = await submitted(stage, key="k")
        error = await refused(stage.stub.Submit(pb.SubmitRequest(service="mail", key="k")))
        assert (error.status, error.code) == (Code.ALREADY_EXISTS, "key_taken")
        assert error.holder == task.id
        kept = pb.SubmitRequest(service="mail", key="k", on_conflict=pb.ON_CONFLICT_KEEP)
        answer = await stage.stub.Submit(kept)
        assert (answer.created, answer.task.id) == (False, task.id)

    async def test_a_repeated_request_with_its_idempotency_key_gives_the_same_task(self, stage):
        metadata = (("idempotency-key", "once"),)
        request = pb.SubmitRequest(service="mail", delay=HOUR)
        first = await stage.stub.Submit(request, metadata=metadata)
        second = await stage.stub.Submit(request, metadata=metadata)
        assert (first.task.id, second.repeated_request) == (second.task.id, True)
        other = pb.SubmitRequest(service="mail", delay=2 * HOUR)
        error = await refused(stage.stub.Submit(other, metadata=metadata))
        assert (error.status, error.code) == (Code.INVALID_ARGUMENT, "idempotency_key_reused")

    @pytest.mark.parametrize(
        ("fields", "code", "message"),
        [
            ({"payload": "{"}, "bad_request", "payload cannot be read: it is not JSON"),
            ({"payload": '"\\ud800"'}, "invalid", "a lone surrogate"),
            ({"payload": "[" * 300 + "]" * 300}, "bad_request", "nested"),
            ({"delay": timedelta(seconds=-1)}, "invalid", "delay must be 0 to"),
            ({"priority": 40_000}, "invalid", "priority must be -32768 to 32767, got 40000"),
            ({"key": ""}, "invalid", "key must be text of 1 to 200 characters"),
            ({"tags": ["no spaces"]}, "invalid", "tags"),
            ({"on_conflict": 9}, "invalid", "on_conflict must be one of reject, replace, keep"),
            ({"service": ""}, "invalid", "service must be 1 to 100 of"),
            ({"service": "other"}, "unknown_service", "no service is named 'other'"),
            ({"idempotency_key": "x"}, "invalid", "use the metadata of Submit"),
        ],
    )
    async def test_an_invalid_task_is_refused_as_over_http(self, stage, fields, code, message):
        request = pb.SubmitRequest(**{"service": "mail"} | fields)
        error = await refused(stage.stub.Submit(request))
        assert error.code == code
        assert message in error.message
        assert error.status is status_of(code, STATUS[code])

    async def test_bytes_that_are_no_message_are_refused(self, stage):
        raw = stage.channel.unary_unary(f"/{SERVICE}/Submit")
        error = await refused(raw(b"\xff\xff\xff"))
        assert (error.status, error.code) == (Code.INVALID_ARGUMENT, "bad_request")
        assert error.message == "the message is not a SubmitRequest"


class TestBatch:
    async def test_a_task_that_is_refused_refuses_only_itself(self, stage):
        tasks = [pb.SubmitRequest(service=name, delay=HOUR) for name in ("mail", "other", "mail")]
        answer = await stage.stub.SubmitBatch(pb.SubmitBatchRequest(tasks=tasks))
        assert (answer.stored, answer.refused) == (2, 1)
        kinds = [item.WhichOneof("result") for item in answer.items]
        assert kinds == ["task", "problem", "task"]
        assert answer.items[1].problem.code == "unknown_service"
        first = answer.items[0].task
        kept = await stage.scheduler.get(first.id)
        assert first.due_at.ToMilliseconds() == kept.due_at_ms
        assert first.state == pb.STATE_DELAY

    async def test_each_task_may_have_its_own_idempotency_key(self, stage):
        one = pb.SubmitRequest(service="mail", delay=HOUR, idempotency_key="once")
        request = pb.SubmitBatchRequest(tasks=[one])
        ids = {(await stage.stub.SubmitBatch(request)).items[0].task.id for _ in range(2)}
        assert len(ids) == 1
        error = await refused(stage.stub.SubmitBatch(request, metadata=(("idempotency-key", "x"),)))
        assert error.code == "bad_request"

    async def test_many_tasks_are_stored_at_once(self, stage):
        tasks = [pb.SubmitRequest(service="mail", delay=HOUR)] * 2_000
        answer = await stage.stub.SubmitBatch(pb.SubmitBatchRequest(tasks=tasks))
        assert (answer.stored, len(answer.items)) == (2_000, 2_000)

    @pytest.mark.parametrize(
        ("message", "why"),
        [
            (b"\x12\x00", "byte 0 is no task"),
            (b"\x0a\x05ab", "the message is cut off"),
            (b"\x0a\xff\xff\xff\xff\xff\x01", "a length is invalid"),
        ],
    )
    async def test_bytes_that_are_no_batch_are_refused(self, stage, message, why):
        error = await refused(stage.channel.unary_unary(f"/{SERVICE}/SubmitBatch")(message))
        assert error.code == "bad_request"
        assert why in error.message


class TestStoredTasks:
    async def test_a_task_is_returned_or_unknown(self, stage):
        task = await submitted(stage, payload="[1]")
        assert (await stage.stub.Get(pb.GetRequest(id=task.id))).task == task
        error = await refused(stage.stub.Get(pb.GetRequest(id=UNKNOWN_ID)))
        assert (error.status, error.code) == (Code.NOT_FOUND, "unknown_task")

    async def test_tasks_are_listed_in_pages_by_filters(self, stage):
        made = [
            (await submitted(stage, key=f"k{n}", tags=["even"] * (n % 2 == 0))).id for n in range(5)
        ]
        newest = sorted(made, reverse=True)  # ids of one millisecond are in the order of shards
        first = await stage.stub.List(pb.ListRequest(limit=3))
        rest = await stage.stub.List(pb.ListRequest(limit=3, cursor=first.next_cursor))
        assert [task.id for task in (*first.tasks, *rest.tasks)] == newest
        assert rest.next_cursor == ""
        even = await stage.stub.List(pb.ListRequest(tags=["even"], state=pb.STATE_DELAY))
        assert [task.id for task in even.tasks] == [one for one in newest if one in made[::2]]
        one = await stage.stub.List(pb.ListRequest(service="mail", key="k3"))
        assert [task.id for task in one.tasks] == [made[3]]
        error = await refused(stage.stub.List(pb.ListRequest(limit=5_000)))
        assert "limit must be 1 to 1000" in error.message

    async def test_tasks_are_listed_by_their_due_time(self, stage):
        tasks = [await submitted(stage, delay=n * HOUR) for n in (1, 2, 3)]
        second, third = (task.due_at for task in tasks[1:])
        for which, found in (
            ({"due_before": third}, tasks[1::-1]),
            ({"due_after": second}, tasks[:0:-1]),
            ({"due_after": second, "due_before": third}, tasks[1:2]),
        ):
            assert [*(await stage.stub.List(pb.ListRequest(**which))).tasks] == found

    async def test_a_task_is_moved_and_cancelled(self, stage):
        task = await submitted(stage)
        answer = await stage.stub.Reschedule(pb.RescheduleRequest(id=task.id, delay=2 * HOUR))
        assert (answer.won, answer.state) == (True, pb.STATE_DELAY)
        moved = (await stage.stub.Get(pb.GetRequest(id=task.id))).task
        assert moved.due_at.ToMilliseconds() > task.due_at.ToMilliseconds() + 3_500_000
        answer = await stage.stub.Cancel(pb.CancelRequest(id=task.id))
        assert (answer.won, answer.state) == (True, pb.STATE_CANCELLED)
        answer = await stage.stub.Cancel(pb.CancelRequest(id=task.id))
        assert (answer.won, answer.state) == (False, pb.STATE_CANCELLED)
        error = await refused(stage.stub.Reschedule(pb.RescheduleRequest(id=task.id)))
        assert "give delay or due_at" in error.message

    async def test_feedback_ends_an_accepted_attempt(self, stage):
        error = await refused(
            stage.stub.Feedback(pb.FeedbackRequest(id=UNKNOWN_ID, attempt=1, outcome=1))
        )
        assert error.code == "unknown_task"
        task = await submitted(stage)
        request = pb.FeedbackRequest(id=task.id, attempt=1, outcome=pb.OUTCOME_FINISHED)
        error = await refused(stage.stub.Feedback(request))
        assert (error.status, error.code) == (Code.FAILED_PRECONDITION, "attempt_over")
        error = await refused(stage.stub.Feedback(pb.FeedbackRequest(id=task.id, attempt=1)))
        assert "outcome must be one of finished, failed, progress" in error.message


class TestWatch:
    async def test_every_change_is_streamed_until_the_end(self, stage):
        task = await submitted(stage)
        call = stage.stub.Watch(pb.WatchRequest(id=task.id))
        assert (await call.read()).task == task
        await stage.scheduler.reschedule(task.id, delay=7200)
        moved = (await call.read()).task
        assert moved.due_at.ToMilliseconds() > task.due_at.ToMilliseconds()
        await stage.scheduler.cancel(task.id)
        assert (await call.read()).task.state == pb.STATE_CANCELLED
        assert await call.read() is grpc.aio.EOF
        assert stage.scheduler.node.feedback.waiters == 0

    async def test_it_needs_no_reads_while_nothing_changes_here(self, stage, monkeypatch):
        monkeypatch.setattr("tickwheel.durable.verbs.tasks.WAIT_POLL_SECONDS", 1e9)
        task = await submitted(stage)
        call = stage.stub.Watch(pb.WatchRequest(id=task.id))
        await call.read()
        await stage.scheduler.cancel(task.id)
        assert (await call.read()).task.state == pb.STATE_CANCELLED

    async def test_a_change_by_another_process_is_seen_by_a_read(self, stage, monkeypatch):
        monkeypatch.setattr("tickwheel.durable.verbs.tasks.WAIT_POLL_SECONDS", 0.01)
        task = await submitted(stage)
        call = stage.stub.Watch(pb.WatchRequest(id=task.id))
        await call.read()
        await stage.scheduler.node.store.cancel([task.id])  # notifies nobody here
        assert (await call.read()).task.state == pb.STATE_CANCELLED

    async def test_an_unknown_task_cannot_be_watched(self, stage):
        call = stage.stub.Watch(pb.WatchRequest(id=UNKNOWN_ID))
        assert (await refused(call.read())).code == "unknown_task"

    async def test_there_is_a_limit_of_watchers(self, stage, monkeypatch):
        monkeypatch.setattr(requests_module, "MAX_WATCHERS", 1)
        task = await submitted(stage)
        first = stage.stub.Watch(pb.WatchRequest(id=task.id))
        await first.read()
        error = await refused(stage.stub.Watch(pb.WatchRequest(id=task.id)).read())
        assert (error.status, error.code) == (Code.UNAVAILABLE, "overloaded")
        assert error.retry_seconds == 1
        first.cancel()
        while stage.requests._watches:
            await asyncio.sleep(0.001)
        await stage.stub.Watch(pb.WatchRequest(id=task.id)).read()

    async def test_a_token_that_is_revoked_sees_no_later_change(self, stage):
        task = await submitted(stage)
        token = await stage.token("read")
        watch = stage.stub.Watch(pb.WatchRequest(id=task.id), metadata=token)
        assert (await watch.read()).task.id == task.id
        await stage.revoke(token)
        await stage.scheduler.cancel(task.id)
        error = await refused(watch.read())
        assert (error.status, error.code) == (Code.UNAUTHENTICATED, "unauthorized")

    async def test_a_stop_ends_it_with_the_advice_to_watch_elsewhere(self, stage):
        task = await submitted(stage)
        call = stage.stub.Watch(pb.WatchRequest(id=task.id))
        await call.read()
        stage.requests.end_watches()
        error = await refused(call.read())
        assert (error.status, error.code) == (Code.UNAVAILABLE, "not_started")


class TestAccess:
    async def test_a_token_is_needed_and_must_be_valid(self, make_stage):
        stage = await make_stage(local=False)
        error = await refused(stage.stub.List(pb.ListRequest()))
        assert (error.status, error.code) == (Code.UNAUTHENTICATED, "unauthorized")
        token = await stage.token("read")
        await stage.stub.List(pb.ListRequest(), metadata=token)
        wrong = (("authorization", token[0][1][:-1] + "_"),)
        error = await refused(stage.stub.List(pb.ListRequest(), metadata=wrong))
        assert error.status is Code.UNAUTHENTICATED

    @pytest.mark.parametrize("name", [*METHODS, WATCH])
    async def test_each_method_needs_its_scope(self, stage, name):
        scope = METHODS[name].scope if name in METHODS else "read"
        other = {"read": "submit", "submit": "read"}[scope]
        path = f"/{SERVICE}/{name}"
        for given, code in ((other, "forbidden"), (scope, None)):
            token = await stage.token(given)
            call = stage.channel.unary_unary(path)(b"\xff", metadata=token)
            error = await refused(call)
            assert error.code == (code or "bad_request")

    async def test_a_token_of_a_namespace_sees_nothing_else(self, stage):
        task = await submitted(stage)
        token = await stage.token("read", "submit", namespace="shop")
        for call in (
            stage.stub.Get(pb.GetRequest(id=task.id), metadata=token),
            stage.stub.Cancel(pb.CancelRequest(id=task.id), metadata=token),
            stage.stub.Watch(pb.WatchRequest(id=task.id), metadata=token).read(),
        ):
            assert (await refused(call)).code == "unknown_task"
        assert not (await stage.stub.List(pb.ListRequest(), metadata=token)).tasks
        await stage.scheduler.put_service(
            "shop/mail", endpoint="http://127.0.0.1:9/", enabled=False
        )
        own = await stage.stub.Submit(pb.SubmitRequest(service="mail", delay=HOUR), metadata=token)
        assert own.task.service == "mail"
        assert (await stage.scheduler.get(own.task.id)).service == "shop/mail"

    async def test_without_the_scope_read_payloads_are_not_shown(self, stage):
        task = await submitted(stage, payload='"secret"', key="k")
        token = await stage.token("submit")
        again = pb.SubmitRequest(service="mail", key="k", on_conflict=pb.ON_CONFLICT_KEEP)
        answer = await stage.stub.Submit(again, metadata=token)
        assert (answer.task.id, answer.task.payload) == (task.id, "")
        own = await stage.stub.Submit(
            pb.SubmitRequest(service="mail", payload="1", delay=HOUR), metadata=token
        )
        assert own.task.payload == "1"

    async def test_the_rate_of_a_token_is_limited(self, stage):
        token = await stage.token("read", rate=0.01)
        await stage.stub.List(pb.ListRequest(), metadata=token)
        error = await refused(stage.stub.List(pb.ListRequest(), metadata=token))
        assert (error.status, error.code) == (Code.RESOURCE_EXHAUSTED, "rate_limited")
        assert error.retry_seconds > 50

    @pytest.mark.parametrize(
        "metadata",
        [
            (("tickwheel-attempt", "1"),),
            (("x-forwarded-for", "10.0.0.1"),),
            (("tickwheel-namespace", "no spaces"),),
            (("authorization", "Bearer a"), ("authorization", "Bearer b")),
        ],
    )
    async def test_suspicious_metadata_are_refused(self, stage, metadata):
        error = await refused(stage.stub.List(pb.ListRequest(), metadata=metadata))
        assert error.code in ("forbidden", "bad_request")

    async def test_nothing_is_submitted_while_the_server_stops(self, stage):
        stage.app.stopping = True
        error = await refused(stage.stub.Submit(pb.SubmitRequest(service="mail")))
        assert (error.status, error.code) == (Code.UNAVAILABLE, "not_started")
        await stage.stub.List(pb.ListRequest())

    async def test_a_request_is_counted_and_its_id_returned(self, stage):
        call = stage.stub.List(pb.ListRequest(), metadata=(("x-request-id", "abc-1"),))
        await call
        assert ("x-request-id", "abc-1") in tuple(await call.trailing_metadata())
        assert stage.app.requests["gRPC", f"/{SERVICE}/List", 200] == 1

    async def test_an_internal_error_shows_nothing(self, stage, monkeypatch, caplog):
        async def broken(*args, **options):
            raise RuntimeError("the password is 7")

        monkeypatch.setattr(stage.scheduler, "list", broken)
        error = await refused(stage.stub.List(pb.ListRequest()))
        assert (error.status, error.code) == (Code.INTERNAL, "internal")
        assert "7" not in error.message
        assert "the password is 7" in caplog.text


class TestLimits:
    async def test_a_batch_has_a_limit_of_tasks(self, make_stage):
        stage = await make_stage(limits=Limits(batch=2))
        tasks = [pb.SubmitRequest(service="mail", delay=HOUR)] * 3
        error = await refused(stage.stub.SubmitBatch(pb.SubmitBatchRequest(tasks=tasks)))
        assert (error.status, error.code) == (Code.INVALID_ARGUMENT, "too_large")
        assert not (await stage.stub.List(pb.ListRequest())).tasks

    async def test_a_payload_has_a_limit(self, make_stage):
        stage = await make_stage(limits=Limits(payload=1000))
        request = pb.SubmitRequest(service="mail", payload=json.dumps("x" * 1000))
        error = await refused(stage.stub.Submit(request))
        assert (error.code, error.message) == (
            "too_large", "a payload may have 1000 bytes, this one has 1002"
        )  # fmt: skip

    async def test_only_a_batch_may_be_larger_than_a_task(self, stage):
        message = b"\x0a" + b"x" * (2 << 20)
        for name in ("Get", "Submit"):
            call = stage.channel.unary_unary(f"/{SERVICE}/{name}")(message)
            assert (await refused(call)).code == "too_large"

    async def test_a_message_over_the_limit_of_a_batch_never_arrives(self, stage):
        call = stage.channel.unary_unary(f"/{SERVICE}/SubmitBatch")(b"x" * (5 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED

    async def test_a_compressed_message_is_refused(self, stage):
        call = stage.stub.Submit(
            pb.SubmitRequest(service="mail", payload=" " * 100_000),
            compression=grpc.Compression.Gzip,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is Code.UNIMPLEMENTED

    async def test_no_message_is_read_before_the_caller_is_admitted(self, make_stage):
        stage = await make_stage(local=False)
        call = stage.channel.stream_unary(f"/{SERVICE}/Submit")()  # sends nothing, ends nothing
        error = await refused(call)
        assert error.status is Code.UNAUTHENTICATED

    async def test_a_caller_that_sends_nothing_gives_way_to_others(self, stage, monkeypatch):
        monkeypatch.setattr(stage.requests._readers, "_limit", 2)
        stuck = []
        for number in (1, 2):  # calls that start together arrive in any order
            stuck.append(stage.channel.stream_unary(f"/{SERVICE}/Get")())
            while len(stage.requests._readers._timers) < number:
                await asyncio.sleep(0.001)
        await stage.stub.List(pb.ListRequest())
        error = await refused(stuck[0])
        assert (error.status, error.code) == (Code.DEADLINE_EXCEEDED, "timeout")
        assert not stuck[1].done()

    async def test_a_request_without_a_message_is_refused(self, stage):
        call = stage.channel.stream_unary(f"/{SERVICE}/Get")()
        await call.done_writing()
        assert (await refused(call)).code == "bad_request"

    async def test_large_answers_that_nobody_reads_are_bounded(self, stage, monkeypatch):
        await submitted(stage, payload=json.dumps("x" * 100_000))
        monkeypatch.setattr(requests_module, "MAX_UNSENT_BYTES", -1)
        error = await refused(stage.stub.List(pb.ListRequest()))
        assert (error.status, error.code) == (Code.UNAVAILABLE, "overloaded")
        monkeypatch.setattr(requests_module, "MAX_UNSENT_BYTES", 0)
        await stage.stub.List(pb.ListRequest())
        while stage.requests._unsent_bytes:
            await asyncio.sleep(0.001)

    @pytest.mark.parametrize("name", ["Submit", "SubmitBatch"])
    async def test_a_task_whose_answer_has_no_room_is_not_stored(self, stage, monkeypatch, name):
        one = pb.SubmitRequest(service="mail", payload=json.dumps("x" * 100_000), delay=HOUR)
        request = one if name == "Submit" else pb.SubmitBatchRequest(tasks=[one])
        monkeypatch.setattr(requests_module, "MAX_UNSENT_BYTES", -1)
        error = await refused(getattr(stage.stub, name)(request))
        assert (error.status, error.code) == (Code.UNAVAILABLE, "overloaded")
        monkeypatch.undo()
        assert not (await stage.stub.List(pb.ListRequest())).tasks

    async def test_a_task_that_was_stored_is_answered_whatever_waits(self, stage, monkeypatch):
        def store_and_fill(*args, store=tasks_module.store_task, **options):
            monkeypatch.setattr(requests_module, "MAX_UNSENT_BYTES", -1)
            return store(*args, **options)

        monkeypatch.setattr(tasks_module, "store_task", store_and_fill)
        assert await submitted(stage, payload=json.dumps("x" * 100_000))


@pytest.mark.parametrize("path", ["/grpc.health.v1.Health/Check", f"/{REFLECTION}/{INFO}"])
async def test_strangers_who_read_no_answers_leave_room_for_others(make_stage, monkeypatch, path):
    monkeypatch.setattr(server_module, "MAX_REQUESTS", 40)
    stage = await make_stage()
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    message = question.SerializeToString() if INFO in path else b""
    with contextlib.closing(Peer(stage.address, window=0)) as peer:
        for _ in range(60):
            peer.call(path, message, end=INFO not in path)
        pending = stage.server._discovery._pending
        while pending.total() < discovery_module.MAX_PENDING_OF_ADDRESS:
            await asyncio.sleep(0.001)
        for _ in range(20):  # each goes through the same queue of the server
            await stage.stub.List(pb.ListRequest())
        assert pending.total() == discovery_module.MAX_PENDING_OF_ADDRESS
    while pending:
        await asyncio.sleep(0.001)


async def test_a_peer_that_vanishes_is_noticed(make_stage, monkeypatch):
    monkeypatch.setattr(server_module, "KEEPALIVE_MS", 500)
    monkeypatch.setattr(server_module, "KEEPALIVE_TIMEOUT_MS", 500)
    stage = await make_stage()
    task = await submitted(stage)
    watch = pb.WatchRequest(id=task.id).SerializeToString()
    with contextlib.closing(Peer(stage.address)) as peer:  # answers no ping
        peer.call(f"/{SERVICE}/{WATCH}", watch)
        while not stage.requests._watches:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(30):  # gRPC's own limit is a minute
            while stage.requests._watches:
                await asyncio.sleep(0.001)


async def test_answers_that_nobody_reads_take_bounded_memory(stage, monkeypatch):
    await submitted(stage, payload=json.dumps("x" * 100_000))
    monkeypatch.setattr(requests_module, "MAX_UNSENT_BYTES", 250_000)
    peer = Peer(stage.address, window=0)
    for _ in range(30):
        peer.call(f"/{SERVICE}/List", b"")
    while stage.app.requests["gRPC", f"/{SERVICE}/List", 503] < 27:
        await asyncio.sleep(0.001)
    assert 250_000 < stage.requests._unsent_bytes < 350_000
    assert (await refused(stage.stub.List(pb.ListRequest()))).code == "overloaded"
    peer.close()
    while stage.requests._unsent_bytes:
        await asyncio.sleep(0.001)
    assert len((await stage.stub.List(pb.ListRequest())).tasks) == 1


async def test_every_code_of_the_http_api_has_a_status():
    assert {code: status_of(code, number) for code, number in STATUS.items()}
    assert all(status_of(code, STATUS[code]) is not Code.OK for code in STATUS)
    internal = {code for code in STATUS if status_of(code, STATUS[code]) is Code.INTERNAL}
    assert internal == {"internal"}
