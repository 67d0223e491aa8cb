"""What each level of evidence says of planted faults: log, summary, page, page and client, probe."""
