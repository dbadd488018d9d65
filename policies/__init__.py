"""Offloading policies and the vocabulary that they share with every executor.

A policy yields *ops*; executors (the SimPy engine, a torch backend) run them. Nothing here imports
an executor, a plotting library or a config library.
"""
