"""A Celery app, as a user would write it; tests and real workers import it.

`SHOP_BROKER` is its broker, `SHOP_BACKEND` its result backend, `SHOP_SERVER` a tickwheel server
with the service `SHOP_SERVICE`; without that it is a plain Celery app.
"""

import functools
import os

from celery import Celery

import tickwheel.celery

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_BACKEND"])
if os.environ["SHOP_SERVER"]:
    tickwheel.celery.install(
        app, os.environ["SHOP_SERVER"], threshold=0.2, service=os.environ["SHOP_SERVICE"]
    )
app.conf.update(  # after the install: an app may be configured late
    broker_connection_retry_on_startup=True,
    task_queue_max_priority=9,
)
task = functools.partial(app.task, shared=False)  # a test has several of these apps


@task(bind=True)
def tell(self, *args, **kwargs):
    """Return what a task can see of its message."""
    request = self.request
    return {
        "args": args,
        "kwargs": kwargs,
        "eta": request.eta,
        "expires": request.expires,
        "headers": request.headers,
        "priority": request.delivery_info["priority"],
        "routing_key": request.delivery_info["routing_key"],
        "retries": request.retries,
    }


@task()
def add(x, y):
    return x + y


@task()
def total(numbers):
    return sum(numbers)


@task(bind=True, max_retries=3)
def flaky(self):
    """Succeed at the third try."""
    if self.request.retries < 2:
        raise self.retry(countdown=0.3)
    return self.request.retries


@task(ignore_result=True)
def note(key):
    """Count a run in the result backend's Redis."""
    app.backend.client.incr(f"runs:{key}")
