"""Words of an error that refuses a request."""

# The words of a refusal, by what refused: a server's queue, and a tenant's limit. Other servers say the same in their
# own words, so that a 429 without a tenant's limit in it counts as the queue's.
REFUSED, BY_LIMIT = "HTTP 429", "has reached"
