"""What the probe costs inside vLLM, and what a diagnosis finds with it."""
