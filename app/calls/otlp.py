"""Export of traces and metrics, by the standard variables of OpenTelemetry."""

import os


def otlp_wanted(signal: str = "TRACES") -> bool:
    """Returns whether these variables name a collector. `signal`: TRACES or METRICS."""
    return any(
        os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    )


def sampler_named() -> bool:
    """Returns whether they name a sampler: then it alone decides, and every group of a sampled batch has spans."""
    return bool(os.environ.get("OTEL_TRACES_SAMPLER"))
