"""On the PYTHONPATH of a server: sets the durations of leases, and other constants, for a test.

TEST_CONSTANTS has the values of constants, as JSON, by module and name.
"""

import importlib
import json
import os

from tickwheel.durable.coordinators.postgres import PostgresCoordinator
from tickwheel.durable.steps import leases

if lease := os.environ.get("TEST_LEASE_SECONDS"):
    leases.LEASE_SECONDS = float(lease)
if ttl := os.environ.get("TEST_TTL_SECONDS"):
    defaults = PostgresCoordinator.__init__.__kwdefaults__
    assert defaults is not None
    defaults["ttl"] = float(ttl)
for place, value in json.loads(os.environ.get("TEST_CONSTANTS", "{}")).items():
    name, _, constant = f"tickwheel.{place}".rpartition(".")
    module = importlib.import_module(name)
    assert hasattr(module, constant), place
    setattr(module, constant, value)
