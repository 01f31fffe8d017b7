"""Checks on a running service: same tokens, fresh KV, nothing left over, a pool that may be killed."""
