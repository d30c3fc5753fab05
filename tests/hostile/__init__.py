"""What strangers send: everything that the schema allows and forbids, and load that is meant to hurt."""
