"""Starts, updates, checks and inspects deployments, for the command line.

`local` serves a configuration on a Ray cluster of its own, `rollout` deploys to a running one. Both check models
(`preflight`) and resources (`checks`) first, and deploy through `deploying`, as `serve deploy` does. `ray_cluster`
connects to a cluster to read measured costs and recordings.
"""
