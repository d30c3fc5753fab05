"""The live page at `/`: activity of the pools, and a prompt whose answer shows what was drafted.

`routes.py` serves the files in `static` and the state as JSON; start there. `watch.py` takes samples
(`samples.py`, collected by `pool_samples.py`) at most once a second, and `state.py` turns two rounds into a state.
"""
