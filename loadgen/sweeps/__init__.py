"""Many runs: sweeps, capacity searches, calibration."""
