"""Bodies of requests: read within their bounds, decoded, and checked against the model of an endpoint."""
