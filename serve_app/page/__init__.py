"""The live page at `/`: shows the pools' activity, and answers a prompt with drafted text marked.

`routes.py` samples the replicas at most once a second, and serves the state and the files in `static`.
"""
