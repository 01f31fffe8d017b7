"""The service's metrics: their registry, the collector that reads them, and their exporters."""
