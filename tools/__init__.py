"""Tools of the `slipstream` command that do not serve requests.

Start with `cli.py`, which assembles the command. `bench` measures speed, `planning` predicts it, `drafts` inspects and
compares draft checkpoints, `doctor` examines a cluster, `kubernetes` renders manifests, and `simulation` runs the
protocol under random faults. Serving modules never import them: imports go protos <- cluster <- actors <- serve_app <-
tools.
"""
