"""On the PYTHONPATH of a server: its leases last as long as the test says, for it has no 30 s."""

import os

from tickwheel.durable import leases

leases.LEASE_SECONDS = float(os.environ["SHORT_LEASE_SECONDS"])
