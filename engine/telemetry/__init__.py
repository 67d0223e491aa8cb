"""What the core observes of itself: ledgers and step records."""
