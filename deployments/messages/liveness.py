"""Maximum silence of a driver, in seconds. Used by the client, which renews its lease, and by the coordinator, which
checks it.
"""

RENEW_S = 5.0
"""Seconds between two renewals of a driver."""

SILENT_S = 12.0
"""Seconds without a renewal after which another driver that submits the same batch may take it over."""

LEASE_S = 60.0
"""Seconds without a renewal after which a batch is cancelled."""
