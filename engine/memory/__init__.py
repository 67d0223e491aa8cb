"""KV blocks and who owns them. Pure bookkeeping: no tensors, no clock."""
