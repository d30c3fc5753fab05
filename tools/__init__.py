"""Tools apart from serving: bench, plan, simulate, trace, examine drafts and clusters, render manifests.

They are installed with the package and run through the `slipstream` command, which `cli.py` assembles; start there.
`bench` measures speed, `planning` predicts it, `drafts` inspects and compares draft checkpoints, `doctor` examines a
cluster, `kubernetes` renders manifests, and `simulation` runs the protocol under random faults. No module that serves
imports them: imports go protos <- cluster <- actors <- serve_app <- tools.
"""
