"""KV blocks and their owners. Pure bookkeeping: no tensors, no clock."""
