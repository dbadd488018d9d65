"""Traces: spans, the metrics computed from them, critical-path attribution and Chrome export."""
