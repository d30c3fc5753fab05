"""The live page at `/`: activity of the pools, and a prompt whose answer shows what was drafted.

`page_routes.py` serves the files in `static` and the state as JSON; start there. `page_watch.py` takes samples
(`samples.py`, collected by `pool_samples.py`) at most once a second, and `page_state.py` turns two rounds into a state.
"""
