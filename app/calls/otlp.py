"""Which traces are exported: by the standard variables of OpenTelemetry."""

import os


def otlp_wanted() -> bool:
    """Whether the standard OpenTelemetry variables name a collector for traces."""
    return any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def sampler_named() -> bool:
    """Whether they name a sampler: then it alone decides, and every group of a sampled batch has spans."""
    return bool(os.environ.get("OTEL_TRACES_SAMPLER"))
