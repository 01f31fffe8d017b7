"""Benchmarks that can be run again, with `tailrace bench NAME` in a checkout; they import the product, never the
reverse."""
