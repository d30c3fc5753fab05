"""Tools beside the server: bench, plan, simulate, trace, examine drafts and clusters, render manifests.

Installed with the package and reached through the `slipstream` command. Nothing that serves imports them: imports go
protos <- cluster <- actors <- serve_app <- tools.
"""
