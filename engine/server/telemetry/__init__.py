"""What the front observes: metrics, recent records, traces, the lag of its event loop."""
