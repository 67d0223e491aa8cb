"""What is measured and what it means. Imports no torch and no engine."""
