"""Spans as OTLP JSON, which trace viewers open: `tailrace rollout --trace FILE` writes it.

The JSON mapping of OTLP: ids are hex, times and integers are strings, and spans are grouped by the resource (process)
and the scope that made them. A file holds one object on one line, as a collector's own files do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tailrace.app.files.output_file import OutputKind
from tailrace.deployments.telemetry import SCOPE

SPANS = OutputKind("spans of ours", (b'{"resourceSpans": [{', b'{"resourceSpans": []}'))

KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
STATUSES = {"unset": 0, "ok": 1, "error": 2}


def traces_data(spans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns `TracesData` of spans as `RolloutClient.take_trace` returns them."""
    by_resource: dict[tuple, list[Mapping[str, Any]]] = {}
    for span in spans:
        by_resource.setdefault(tuple(sorted(span["resource"].items())), []).append(span)
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(dict(resource))},
                "scopeSpans": [{"scope": {"name": SCOPE}, "spans": [_span(span) for span in of]}],
            }
            for resource, of in by_resource.items()
        ]
    }


def _span(span: Mapping[str, Any]) -> dict[str, Any]:
    parent = {"parentSpanId": span["parent_id"]} if span["parent_id"] else {}
    return {
        "traceId": span["trace_id"],
        "spanId": span["span_id"],
        **parent,
        "name": span["name"],
        "kind": KINDS[span["kind"]],
        "startTimeUnixNano": str(span["start_unix_ns"]),
        "endTimeUnixNano": str(span["end_unix_ns"]),
        "attributes": _attributes(span["attributes"]),
        "events": [
            {
                "timeUnixNano": str(event["unix_ns"]),
                "name": event["name"],
                "attributes": _attributes(event["attributes"]),
            }
            for event in span["events"]
        ],
        "links": [
            {"traceId": link["trace_id"], "spanId": link["span_id"], "attributes": _attributes(link["attributes"])}
            for link in span["links"]
        ],
        "status": {"code": STATUSES[span["status"]], "message": span["status_message"]},
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    """Returns the value of an attribute: text, a number, a truth value, or a list of them."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": list(map(_value, value))}}
    return {"stringValue": value}
