"""A channel whose answers a test chooses: the callee of services over a network."""

import asyncio
import inspect

from tickwheel.durable.channel import Answer
from tickwheel.values.task import Event

URL = "https://callee.example/"
OK = Answer(Event.FINISH, healthy=True)
BROKEN = Answer(Event.RETRY, error="500", healthy=False)
REFUSED = Answer(Event.RETRY, error="400", healthy=True)
ACCEPTED = Answer(Event.ACCEPT, healthy=True)
GONE = Answer(Event.RELEASE, error="410", gone=True)


class Callee:
    """Records each call and answers with `answer`, a value or a function of task and service.

    - `remote`, like every channel to another process: a sent call goes on elsewhere.
    """

    remote = True

    def __init__(self, stage, answer=OK):
        self._stage = stage
        self.answer = answer
        self.calls = []  # when, the service's name, the task
        self.services = []  # as they were at each call
        self.forgotten = []
        self.latencies = {}
        self.trace = None

    def semaphore(self, service):
        return None

    def interruptible(self, service):
        return True

    def check(self, service):
        if not service.endpoint.startswith("https://"):
            raise ValueError(f"endpoint must be an https URL, got {service.endpoint!r}")

    async def send(self, task, service, may_send):
        self.calls.append((self._stage.seconds, service.name, task))
        self.services.append(service)
        answer = self.answer
        if not isinstance(answer, Answer):
            answer = answer(task, service)
        return await answer if inspect.isawaitable(answer) else answer

    def forget(self, name):
        self.forgotten.append(name)

    async def close(self):
        pass

    @property
    def times(self):
        """When each call was."""
        return [at for at, *_ in self.calls]

    def times_of(self, name):
        """When each call of one service was."""
        return [at for at, service, _ in self.calls if service == name]


class Held:
    """Answers that wait until they are given: to all calls so far, or to the oldest of them."""

    def __init__(self):
        self.waiting = []

    def __call__(self, task, service):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        return future

    def give(self, answer=OK, count=None):
        """Answer those that wait, or the oldest `count` of them."""
        count = len(self.waiting) if count is None else count
        for future in self.waiting[:count]:
            if not future.done():
                future.set_result(answer)
        del self.waiting[:count]


def calling(stage, answer=OK, **options):
    """A scheduler on the stage, not started, and the callee of its services."""
    app, callee = stage.app(**options), Callee(stage, answer)
    make_channels = app._make_channels
    app._make_channels = lambda now_ms: make_channels(now_ms) | {"http": callee}
    return app, callee
