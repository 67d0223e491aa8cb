"""What a user got, and where the time of a request went."""
