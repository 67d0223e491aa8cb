"""The processes of a parallel group. Rank 0 is the core process: it plans. The others compute what it plans."""
