"""A recorded run through the real scheduler again, on a virtual clock, with something changed."""
