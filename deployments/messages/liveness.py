"""How long a driver may be silent, seconds. Known to the client, which renews, and to the coordinator, which counts."""

RENEW_S = 5.0
"""Between two signs of life of a driver."""

SILENT_S = 12.0
"""A driver that has been silent for this long may be replaced by one that asks for the same batch."""

LEASE_S = 60.0
"""A batch whose driver has been silent for this long is cancelled."""
