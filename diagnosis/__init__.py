"""From records to verdicts: symptom, lifecycle, cause, evidence, the measurement that would prove it, the fix."""
