"""Quantised checkpoints: what each format's tensors say, as QuantisedMatrix. Errors name the tensor."""
