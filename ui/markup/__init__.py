"""HTML: reports and the fragments that pages share."""
