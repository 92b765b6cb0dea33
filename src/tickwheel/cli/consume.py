"""`consume`: turn the messages of a queue into tasks, until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.output import Output, examples, with_output
from tickwheel.cli.remote import server_options, service_names
from tickwheel.cli.terminal import print_line
from tickwheel.cli.types import DURATION

if TYPE_CHECKING:
    from tickwheel.consumer import Consumer

REPORT_SECONDS = 60.0


@click.command(
    epilog=examples(
        "tickwheel consume orders --broker kafka://localhost:9092",
        "tickwheel consume orders --broker amqp://guest:guest@localhost/ --dead-letter refused",
        "tickwheel consume paid --broker redis://localhost:6379/0 --service close --delay 30m",
    )
)
@click.argument("name")
@click.option(
    "--broker", envvar="TICKWHEEL_BROKER", show_envvar=True, required=True, metavar="URL",
    help="kafka://, amqp:// or redis://; others can see flags, so a password belongs in the"
    " environment.",
)  # fmt: skip
@click.option(
    "--group", default="tickwheel", show_default=True,
    help="The consumer group, on Kafka and Redis.",
)  # fmt: skip
@click.option(
    "--service", shell_complete=service_names,
    help="Take each message as the payload of a task of this service.",
)  # fmt: skip
@click.option("--delay", type=DURATION, help="With --service: when the tasks are due, from now.")
@click.option(
    "--dead-letter", metavar="NAME",
    help="The topic, queue or stream for messages that cannot become tasks.",
)  # fmt: skip
@click.option(
    "--identity", metavar="TEXT",
    help="Identifies the source in place of the cluster's id or the address in the URL.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=1000, show_default=True,
    help="The most messages that are stored together.",
)  # fmt: skip
@server_options
@with_output
def consume(
    *, out: Output, name: str, broker: str, service: str | None, delay: float | None, batch: int,
    server: str, token: str | None, namespace: str | None, **options: Any,
) -> None:  # fmt: skip
    """Turn the messages of a queue into tasks.

    NAME is a topic of Kafka, a queue of RabbitMQ or a stream of Redis. A message is the JSON of a
    task, as POST /v1/tasks takes it: {"service": ..., "payload": ..., "delay": ...}. With
    --service, it is the payload itself.

    A message is acknowledged after its task is stored. A message that comes again within 24 hours
    stores nothing. Several of these commands share the work.

    It runs until SIGTERM or Ctrl-C, ends the batch in progress, and prints its counts.
    """
    try:
        from tickwheel.client import AsyncClient  # noqa: PLC0415 - not for --help
        from tickwheel.consumer import Consumer, source_at  # noqa: PLC0415

        source = source_at(broker, name, batch=batch, **options)
    except ImportError as missing:
        raise click.ClickException(str(missing)) from missing
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if delay is not None and service is None:
        raise click.UsageError("--delay needs --service: otherwise each message has its own delay")
    set_up_log()

    async def run() -> Consumer:
        async with AsyncClient(server, token, namespace) as client:
            consumer = Consumer(source, client, service=service, delay=delay, batch=batch)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, consumer.stop)
            reporting = loop.create_task(report(consumer))
            try:
                await consumer.run()
            finally:
                reporting.cancel()
            return consumer

    print_line(f"consuming {name}, storing tasks in {server}", err=True)
    done = asyncio.run(run())
    counts = {"stored": done.stored, "refused": done.refused}
    out.result(counts, f"stored {done.stored:,}, refused {done.refused:,}")


def set_up_log() -> None:
    """Write the log to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tickwheel.consumer").setLevel(logging.INFO)


async def report(consumer: Consumer) -> None:
    """Log the counts each minute in which they change."""
    last = (0, 0)
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        now = (consumer.stored, consumer.refused)
        if now != last:
            text = "stored %d messages, refused %d"
            logging.getLogger("tickwheel.consumer").info(text, *now)
            last = now
