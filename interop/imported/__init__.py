"""Result files of other load generators, as runs: what they say, and what they leave out."""
