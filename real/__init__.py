"""The torch engine: executes the plans that the simulator simulates, on a GPU or its CPU twin."""
