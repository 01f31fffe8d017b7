"""A live service in the terminal: rates between two readings, and tables. `tailrace status` and `tailrace top`."""
