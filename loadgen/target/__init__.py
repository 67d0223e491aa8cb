"""The server under test: its address, tokenizer, metrics and process."""
