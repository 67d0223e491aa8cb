"""What a server's KV cache holds, evicts and would gain from more memory: live from KV events, or of a recorded run."""
