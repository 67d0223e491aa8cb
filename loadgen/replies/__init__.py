"""What the bytes of a reply mean."""
