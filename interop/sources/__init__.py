"""What servers tell of themselves at /metrics, translated into our catalogue and our accounts."""
