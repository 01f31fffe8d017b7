"""A live soak: a real service under random faults for an hour, every answer compared with a reference."""
