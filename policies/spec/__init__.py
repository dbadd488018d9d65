"""Specifications: models, hardware, workloads and the curves that describe measured rates."""
