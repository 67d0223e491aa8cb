"""Live servers: scrapes as they come, and what the last minute of them says."""
