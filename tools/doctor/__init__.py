"""`slipstream doctor`: what a Ray cluster lacks for a configuration, and how to fix it.

`examination.py` starts a probe (`probe.py`) on every node and collects their findings as `facts.py` defines them.
`judgement.py` turns facts into checks, and `report.py` prints them. Start with `judgement.py`, which lists the checks.
"""
