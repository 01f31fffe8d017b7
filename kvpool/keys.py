"""Names under which KV is kept. Invariant (law 6): KV written under one weights version is never
read under another, so the version is part of every name. Called by the engine runner."""


def cache_salt(weights_version: int) -> str:
    """vLLM's per-request `cache_salt`: it enters the hash of the first block and so of every block."""
    return f"weights-{weights_version}"
