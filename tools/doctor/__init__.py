"""`slipstream doctor`: finds faults of a Ray cluster for a configuration, and names their fixes.

Start with `checks.py`, which checks and reports facts. `probe.py` collects the facts on every node.
"""
