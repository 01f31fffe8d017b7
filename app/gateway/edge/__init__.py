"""The edge of the gateway: bodies read strictly, fields without nulls, errors in vLLM's form."""
