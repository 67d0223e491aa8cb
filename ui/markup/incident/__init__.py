"""The parts of a report that a reader moves: objectives, the timeline of all requests, the ledger of any of them."""
