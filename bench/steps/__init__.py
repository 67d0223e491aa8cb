"""Single parts of a step, and what each takes."""
