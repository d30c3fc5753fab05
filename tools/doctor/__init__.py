"""`slipstream doctor`: finds what a Ray cluster lacks for a configuration, and how to fix it.

`probe.py` examines every node and collects facts. `checks.py` turns the facts into checks and prints them; start there.
"""
