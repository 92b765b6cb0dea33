"""The Celery app of `celery_eta.py`: plain, or with tickwheel if `BENCH_SERVER` has its URL."""

from __future__ import annotations

import json
import os

from celery import Celery

app = Celery("celery_app", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=json.loads(os.environ.get("BENCH_TRANSPORT", "{}")),
    task_ignore_result=True,
    worker_log_color=False,
)
if os.environ.get("BENCH_SERVER"):
    import tickwheel.celery

    tickwheel.celery.install(app, os.environ["BENCH_SERVER"], threshold=1.0, fallback=False)


@app.task  # type: ignore[untyped-decorator]
def count(name: str) -> None:
    """Count a run."""
    from redis import Redis

    with Redis.from_url(os.environ["BENCH_COUNTS"]) as redis:
        redis.incr(name)
