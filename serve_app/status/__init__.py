"""What a running deployment is at, as tables: `slipstream status`."""
