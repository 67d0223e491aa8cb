"""What people have in hand of a server, read as far as it says: logs, pages, summaries, flags, sensors."""
