"""What clients may send and what they get: OpenAI's protocol, requests and serializers."""
