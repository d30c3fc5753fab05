"""Hostile clients: everything the schema allows and forbids, and harmful load."""
