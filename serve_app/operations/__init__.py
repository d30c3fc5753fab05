"""Starting a deployment, and looking at one that runs."""
