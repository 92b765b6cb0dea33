"""How a run with several workers is divided among them: by files, and the long ones first.

Files that use the same servers, which are slow to start, are divided as one. `seconds.txt` has the
files that take more than a few seconds; this renews it:

    make test PYTEST_ARGS=--junitxml=junit.xml && python tests/distribution.py junit.xml
"""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

HERE = Path(__file__).resolve().parent
SECONDS = HERE / "seconds.txt"
LISTED_FROM = 4  # seconds
SPREAD = {"test_asyncio_suite.py", "test_pure_timers.py"}  # each test is a long process of its own
# Each worker that had one of these would start RabbitMQ and Kafka.
BROKER_FILES = """
    contracts/test_source.py contracts/test_channel.py consumer/test_kill.py
    durable/channels/test_kafka.py durable/channels/test_rabbitmq.py
    durable/channels/test_celery.py durable/channels/test_stuck_broker.py
    durable/channels/test_idle_connection.py durable/channels/test_broker_tls.py
    celery_app/test_release.py celery_app/test_workers.py receiver/test_queue_example.py
    test_channel_docs.py
"""
BROKERS = BROKER_FILES.split()


def name_of(item):
    return item.path.relative_to(HERE).as_posix()


def scope_of(name):
    """Return what the tests of a file are divided with: their file, or all files with brokers."""
    return "brokers" if name in BROKERS else name


def listed_seconds():
    """Return the measured seconds of the long files, by name."""
    rows = (line.split() for line in SECONDS.read_text("utf-8").splitlines())
    return {name: int(seconds) for seconds, name in rows}


def begin_with_long_files(items):
    """Sort the tests by files: the longest first, then by the number of tests."""
    counts = Counter(scope_of(name_of(item)) for item in items)
    seconds = Counter()
    for name, each in listed_seconds().items():
        seconds[scope_of(name)] += each

    def rank(item):
        name = name_of(item)
        scope = scope_of(name)
        return -seconds[scope], -counts[scope], scope, name

    items.sort(key=rank)


def make_scheduler(config, log):
    """Keep the tests of a file on one worker with --dist loadfile, except the files in SPREAD."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SpreadingScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            name = file.removeprefix("tests/")
            return nodeid if name in SPREAD else scope_of(name)

    config.option.loadscopereorder = False  # `begin_with_long_files` has sorted them
    return SpreadingScheduling(config, log)


def file_of(case):
    """Return the name of the file of a test in a JUnit file: a class follows the module."""
    parts = case.get("classname").split(".")[1:]
    while not HERE.joinpath(*parts).with_suffix(".py").is_file():
        parts.pop()
    return "/".join(parts) + ".py"


def renew_seconds(junit):
    """Write the table of seconds from the JUnit file of a run."""
    measured = Counter()
    for case in ET.parse(junit).iter("testcase"):
        measured[file_of(case)] += float(case.get("time"))
    rows = [f"{seconds:3.0f} {name}" for name, seconds in measured.most_common()]
    long = [row for row in rows if int(row.split()[0]) >= LISTED_FROM]
    SECONDS.write_text("\n".join(long) + "\n", "utf-8")


if __name__ == "__main__":
    renew_seconds(sys.argv[1])
