"""Orders that expire: durable tasks on SQLite, in a program without asyncio.

`app.blocking()` has the verbs of the scheduler as ordinary methods, for any thread. The shop is
killed during its work, and the next one finds every order again.

    python examples/order_expiry_sync.py

With asyncio: `order_expiry.py`.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tickwheel.durable import Scheduler

DATABASE = "ORDERS_DATABASE"  # the variable with the path of the file, for both shops


def open_shop(path):
    """Return the scheduler and its one function."""
    app = Scheduler(f"sqlite:///{path}")

    @app.task
    def expire(order_id):
        return f"order {order_id} has expired"

    return app, expire


def first_shop(path):
    """Take two orders, then kill this process."""
    app, expire = open_shop(path)
    with app.blocking():
        expire.submit_sync("o-1", delay=0.5, key="order:o-1")
        expire.submit_sync("o-2", delay=1800, key="order:o-2")
        print("two orders are stored", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def second_shop(path):
    """Continue where the first one was killed."""
    app, _ = open_shop(path)
    with app.blocking() as shop:
        orders = shop.list(service="expire", final=None).items
        print(f"found again: {', '.join(sorted(task.key for task in orders))}")
        (paid,) = shop.cancel_key("order:o-2")
        print(f"o-2 is paid in time: {paid.won}")
        for task in orders:
            ended = shop.wait(task.id)
            print(f"{ended.key}: {ended.state}" + (f", {ended.result}" if ended.result else ""))


if DATABASE in os.environ:
    first_shop(os.environ[DATABASE])
else:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "orders.db"))
        again = [sys.executable, *sys.orig_argv[1:]]  # this program, as it was started
        ended = subprocess.run(again, env=os.environ | {DATABASE: path}, check=False)  # noqa: S603
        print(f"the first shop was killed: {ended.returncode == -signal.SIGKILL}")
        second_shop(path)
