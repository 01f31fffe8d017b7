"""Commands that check the service: every token, under faults and over repeated runs."""
