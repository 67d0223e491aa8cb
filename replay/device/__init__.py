"""What one step costs on a device that nobody here has: three makers of one estimate."""
