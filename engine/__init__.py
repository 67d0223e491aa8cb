"""A continuous-batching inference engine with an OpenAI-compatible server."""
