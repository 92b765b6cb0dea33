"""On the PYTHONPATH of a server: its leases, and those of nodes, last as long as a test says."""

import os

from tickwheel.durable import leases
from tickwheel.durable.coordinators.postgres import PostgresCoordinator

if lease := os.environ.get("TEST_LEASE_SECONDS"):
    leases.LEASE_SECONDS = float(lease)
if ttl := os.environ.get("TEST_TTL_SECONDS"):
    PostgresCoordinator.__init__.__kwdefaults__["ttl"] = float(ttl)
