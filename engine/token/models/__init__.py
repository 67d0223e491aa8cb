"""Model families, read from Hugging Face checkpoints as they are."""
