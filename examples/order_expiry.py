"""Orders that expire: durable tasks on SQLite, with asyncio.

An order that is not paid in time is closed. The deadline is a task in a file: it survives the
process, however it ends. Here one order is paid, one gets more time, one expires, and the
payment of one fails until it has no attempts left.

    python examples/order_expiry.py

Without asyncio: `order_expiry_sync.py`.
"""

import asyncio
import logging
import tempfile

from tickwheel.durable import Fail, Scheduler, current_task

logging.getLogger("tickwheel").setLevel(logging.ERROR)  # the failures here are intended
folder = tempfile.TemporaryDirectory()
app = Scheduler(f"sqlite:///{folder.name}/orders.db")


@app.task
async def expire(order_id):
    """Close an unpaid order."""
    return f"order {order_id} has expired"


@app.task(max_attempts=3, backoff=[0.1, 0.2])
async def charge(order_id, cents):
    """Take the money; the bank is failing today."""
    if cents <= 0:
        return Fail("there is nothing to charge")
    raise ConnectionError(f"the bank did not answer attempt {current_task().attempt}")


async def main():
    """Run the shop for a few seconds."""
    async with app:
        orders = {}
        for order_id in ("o-1", "o-2", "o-3"):
            orders[order_id] = await expire.submit(order_id, delay=1800, key=f"order:{order_id}")
        (paid,) = await app.cancel_key("order:o-1")
        print(f"o-1 is paid in time: {paid.won}, and is {paid.state}")
        moved = await app.reschedule(orders["o-2"].id, delay=3600)
        print(f"o-2 gets an hour more: {moved.won}")
        await app.reschedule(orders["o-3"].id, delay=0.2)
        print((await app.wait(orders["o-3"].id)).result)

        task = await app.wait((await charge.submit("o-4", cents=4200)).id)
        print(f"o-4 is {task.state} after {task.failures} failures:")
        for attempt in await app.attempts(task.id):
            print(f"  {attempt.attempt}: {attempt.event}, {attempt.error.splitlines()[-1]}")
        task = await app.wait((await charge.submit("o-5", cents=0)).id)
        print(f"o-5 is {task.state} at once: {task.error}")

    async with app:  # another day: pending tasks are still pending
        waiting = (await app.list(final=False)).items
        print(f"still to come: {', '.join(task.key for task in waiting)}")


asyncio.run(main())
folder.cleanup()
