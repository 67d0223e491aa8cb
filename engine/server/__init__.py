"""FastAPI app, OpenAI protocol and streaming. Talks to the loop by messages; knows no torch."""
