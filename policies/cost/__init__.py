"""Costs: FLOPs, bytes and seconds of one op, each computed in exactly one place."""
