"""What will be sent and when, fixed before the first request."""
