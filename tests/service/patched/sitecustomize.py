"""On the PYTHONPATH of a server: sets the durations of leases, and other constants, for a test.

TEST_CONSTANTS has the values of constants, as JSON, by module and name.
"""

import importlib
import json
import os
import threading
import time


def sleep(seconds):
    """Sleep without the system call that libfaketime miscalculates: it may fail with EINVAL."""
    threading.Event().wait(seconds)


def set_constant(place, value):
    """Set a constant, given its module and name."""
    module, _, name = f"tickwheel.{place}".rpartition(".")
    found = importlib.import_module(module)
    assert hasattr(found, name), place
    setattr(found, name, value)


def set_default(place, option, value):
    """Set the default of a keyword argument of a class, given its module and name."""
    module, _, name = f"tickwheel.durable.{place}".rpartition(".")
    defaults = getattr(importlib.import_module(module), name).__init__.__kwdefaults__
    assert option in defaults, place
    defaults[option] = value


if "FAKETIME_TIMESTAMP_FILE" in os.environ:
    time.sleep = sleep  # before kazoo is imported, which keeps it
if lease := os.environ.get("TEST_LEASE_SECONDS"):
    set_constant("durable.steps.leases.LEASE_SECONDS", float(lease))
if ttl := os.environ.get("TEST_TTL_SECONDS"):
    set_default("coordinators.postgres.PostgresCoordinator", "ttl", float(ttl))
if session := os.environ.get("TEST_SESSION_SECONDS"):
    set_default("coordinators.zookeeper.ZooKeeperCoordinator", "session", float(session))
for place, value in json.loads(os.environ.get("TEST_CONSTANTS", "{}")).items():
    set_constant(place, value)
