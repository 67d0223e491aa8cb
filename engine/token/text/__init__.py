"""Text to ids and back: tokenizer, chat template, vocabulary."""
