"""A server under record: started or found, with its log, its pages and, where it can be, the probe, as one run."""
