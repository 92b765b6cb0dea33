"""The callee of the chaos run: answers calls, sends feedback, and keeps a ledger of both.

    python -m chaos.callee ADDRESS PORT LEDGER SEED NODE...

Its answer to each attempt is a result of its own, so that the stored result shows whose it is.
"""

import asyncio
import json
import random
import signal
import sys
import threading
from pathlib import Path

from chaos.ledger import Ledger
from receivers import Receiver
from tickwheel.client import AsyncClient
from tickwheel.errors import TickwheelError

FEEDBACK_SECONDS = 10.0  # for which a feedback is retried


class Callee:
    """Its behaviours, by path."""

    def __init__(self, ledger, seed, nodes):
        self._ledger = ledger
        self._chance = random.Random(seed)
        self._nodes = nodes
        self._feedbacks = set()

    def _note(self, call):
        """Note a call, and return its id, attempt and epoch."""
        header = call.request.header
        found = (
            header("webhook-id"),
            int(header("tickwheel-attempt")),
            int(header("tickwheel-epoch")),
        )
        self._ledger.note(
            "call", id=found[0], attempt=found[1], epoch=found[2], path=call.request.path,
            payload=json.loads(call.request.body), connection=call.request.connection,
        )  # fmt: skip
        return found

    async def _answer(self, call, status, task_id, attempt):
        self._ledger.note("answer", id=task_id, attempt=attempt, status=status)
        body = json.dumps(result(task_id, attempt)).encode() if status == 200 else b""
        await call.answer(status, body, [("Content-Type", "application/json")])

    async def plain(self, call):
        task_id, attempt, _ = self._note(call)
        await self._answer(call, 200, task_id, attempt)

    async def slow(self, call):
        task_id, attempt, _ = self._note(call)
        await asyncio.sleep(self._chance.uniform(0.1, 1.5))
        await self._answer(call, 200, task_id, attempt)

    async def flaky(self, call):
        task_id, attempt, _ = self._note(call)
        await self._answer(call, self._chance.choice((200, 200, 500)), task_id, attempt)

    async def doomed(self, call):
        task_id, attempt, _ = self._note(call)
        await self._answer(call, 500, task_id, attempt)

    async def later(self, call):
        found = self._note(call)
        task = asyncio.create_task(self._feed_back(*found))
        self._feedbacks.add(task)
        task.add_done_callback(self._feedbacks.discard)
        await self._answer(call, 202, *found[:2])

    async def _feed_back(self, task_id, attempt, epoch):
        """Report an accepted task; sometimes it is still in progress, sometimes it has failed."""
        await asyncio.sleep(self._chance.uniform(0, 1.5))
        outcome = self._chance.choice(("progress", "failed", *["finished"] * 6))
        if outcome == "progress":
            await self._report(task_id, attempt, epoch, "progress")
            await asyncio.sleep(self._chance.uniform(0, 2))
            outcome = "finished"
        await self._report(task_id, attempt, epoch, outcome)

    async def _report(self, task_id, attempt, epoch, outcome):
        node = self._chance.choice(self._nodes)
        options = {"attempt": attempt, "epoch": epoch}
        if outcome == "finished":
            options["result"] = result(task_id, attempt)
        note = {"id": task_id, "attempt": attempt, "outcome": outcome}
        try:
            async with AsyncClient(node, timeout=FEEDBACK_SECONDS) as client:
                verdict = await client.feedback(task_id, outcome, **options)
        except TickwheelError as error:
            self._ledger.note("unknown", **note, error=error.code)
        else:
            self._ledger.note("feedback", **note, won=verdict.won)


def result(task_id, attempt):
    """Return the result of one attempt, which no other has."""
    return {"task": task_id, "attempt": attempt}


def main(address, port, ledger, seed, *nodes):
    """Answer until SIGTERM."""
    callee = Callee(Ledger(Path(ledger)), int(seed), nodes)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with Receiver(address, int(port)) as receiver:
        for name in ("plain", "slow", "flaky", "doomed", "later"):
            receiver.on(f"/{name}", getattr(callee, name))
        print("ready", flush=True)
        ended.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
