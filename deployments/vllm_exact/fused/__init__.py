"""The sampling kernel of GPUs, in Triton: two launches, scan and settle, over a batch of rows."""
