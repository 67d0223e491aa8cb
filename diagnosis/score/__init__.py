"""The score of a diagnosis: recorded runs with planted faults, what was said of each, and how often that was right."""
