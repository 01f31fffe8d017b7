"""One command a file; `tailrace bench NAME` loads it."""
