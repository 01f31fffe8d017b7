"""The edge of the gateway: strict parsing of bodies, fields without nulls, errors in vLLM's format."""
