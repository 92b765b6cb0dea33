"""A fake client, and the values that it returns."""

from datetime import UTC, datetime

from tickwheel.client import Page, State, Verdict
from tickwheel.client.task import Task
from tickwheel.client.values import Schedule, Service, Submitted

ID = "0198c0de00007000a1b2c3d4e5f60718"
AT = "2030-01-31T12:00:00.000Z"


def task(**more):
    document = {
        "id": ID, "service": "sums", "payload": [1], "key": None, "state": "delay", "due_at": AT,
        "shard": 3, "attempt": 0, "failures": 0, "max_attempts": 5, "created_at": AT,
        "updated_at": AT, "result": None, "error": None, "priority": 0, "timeout": None,
        "deadline": None, "replay_of": None, "replayed_as": None, "node": None, "epoch": 0,
    }  # fmt: skip
    return Task.of(document | more)


def service(**more):
    document = {
        "name": "sums", "protocol": "http", "endpoint": "https://shop.example/", "timeout": 30.0,
        "max_attempts": 5, "backoff": {"first": 1.0, "factor": 2.0, "max": 3600.0, "jitter": 0.1},
        "concurrency": 100, "rate": None, "secret": "********", "headers": {"x-a": "********"},
        "feedback_timeout": 3600.0, "breaker": None, "enabled": True, "version": 1,
        "updated_at": AT,
    }  # fmt: skip
    return Service.of(document | more)


def schedule(**more):
    document = {
        "name": "nightly", "service": "sums", "payload": None, "cron": "0 3 * * *",
        "interval": None, "tz": "UTC", "missed": "once", "enabled": True, "priority": 0,
        "timeout": None, "max_attempts": 5, "next_at": AT, "created_at": AT,
    }  # fmt: skip
    return Schedule.of(document | more)


ANSWERS = {
    "submit": task(),
    "get": task(),
    "attempts": [],
    "list": Page([task()], None),
    "cancel": Verdict(ID, True, State.CANCELLED),
    "cancel_where": 3,
    "reschedule": Verdict(ID, True, State.DELAY),
    "feedback": Verdict(ID, True, State.FINISHED),
    "backlog": Page([task(state="failed", error="boom")], None),
    "replay": task(replay_of=ID),
    "replay_where": 2,
    "services": [service()],
    "get_service": service(),
    "put_service": service(),
    "delete_service": None,
    "schedules": [schedule()],
    "schedules_page": Page([schedule()], None),
    "get_schedule": schedule(),
    "put_schedule": schedule(),
    "delete_schedule": None,
    "nodes": [],
    "drain_node": None,
    "undrain_node": None,
    "shards": [],
    "audit": Page([], None),
}


class FakeClient:
    """A client whose answers a test sets, and which records its calls."""

    def __init__(self):
        self.answers = dict(ANSWERS)
        self.calls = []
        self.made = None
        self.server = "http://fake"

    def __call__(self, *args, **options):
        self.made = (args, options)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, verb):
        if verb.startswith("__"):
            raise AttributeError(verb)

        def call(*args, **options):
            given = {
                name: value
                for name, value in options.items()
                if value is not None or name == "secret"  # whose None means something
            }
            self.calls.append((verb, args, given))
            answer = self.answers[verb]
            if isinstance(answer, list) and answer and isinstance(answer[0], Page):
                answer = answer.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call

    def submit_stream(self, requests, *, batch):
        return self._stored(requests, batch)

    def _stored(self, requests, batch):
        for request in requests:
            self.calls.append(("submit_many", (request,), {"batch": batch}))
            answer = self.answers.get(request.get("payload"))
            yield answer or Submitted(ID, State.DELAY, datetime(2030, 1, 31, tzinfo=UTC))
