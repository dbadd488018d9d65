"""Importers: measurements that other tools took, as measurement records."""
