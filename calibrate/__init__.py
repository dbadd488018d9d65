"""Calibration: measure a machine, fit a hardware profile, and say how far simulation is from it."""
