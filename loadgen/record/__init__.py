"""The cold path: events of the client become its table."""
