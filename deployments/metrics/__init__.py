"""The service's metrics: their registry, the books that they are read from, and their exporters."""
