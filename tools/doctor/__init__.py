"""`slipstream doctor`: what a Ray cluster lacks for a configuration, and how to fix it.

`probe.py` examines every node and collects the findings as facts. `checks.py` turns facts into checks and prints them;
start there.
"""
