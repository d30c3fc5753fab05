"""`slipstream status`: the state of a running deployment, as terminal tables.

`report.py` is the entry point: it reads the HTTP endpoint and, through Ray, what replicas answer to `inspect`. The
other modules make its tables: acceptance, pool sizes and versions of prompts. `watch.py` is `slipstream status
--watch`.
"""
