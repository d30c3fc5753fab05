"""The live page at `/`: activity of the pools, and a prompt whose answer shows what was drafted.

`routes.py` samples the replicas at most once a second, and serves the state and the files in `static`.
"""
