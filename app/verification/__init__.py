"""What is shown rather than claimed: same tokens, fresh KV, nothing left behind, a pool that may be killed."""
