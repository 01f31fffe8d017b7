"""A soak: a real service under random faults for an hour, with every answer compared with a reference."""
