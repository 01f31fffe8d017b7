"""`tailrace.http.Client`: the service over HTTP, with httpx and pydantic alone. See docs/http.md."""

from tailrace.app.http.client import Client, ServerInfo, WeightInfo

__all__ = ["Client", "ServerInfo", "WeightInfo"]
