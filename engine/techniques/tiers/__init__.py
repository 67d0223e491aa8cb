"""KV tiers below the device: which blocks host memory, a disk and a remote server hold. Bookkeeping without tensors."""
