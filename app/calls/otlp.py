"""Whether traces are exported: by the standard variables of OpenTelemetry."""

import os


def otlp_wanted() -> bool:
    """Whether the standard OpenTelemetry variables name a collector for traces."""
    return any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
