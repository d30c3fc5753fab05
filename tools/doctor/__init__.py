"""`slipstream doctor`: what a Ray cluster lacks for a configuration, and how to fix it.

`probe_runner.py` starts a probe (`probe.py`) on every node and collects their findings as `facts.py` defines them.
`checks.py` turns facts into checks, and `report.py` prints them. Start with `checks.py`, which lists the checks.
"""
