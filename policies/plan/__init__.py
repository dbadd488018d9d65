"""Plans: ops, the linker that derives their dependencies, and the checker of the laws."""
