"""A live service in the terminal: rates between two looks, and tables. `tailrace status` and `tailrace top`."""
