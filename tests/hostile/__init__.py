"""Hostile clients: allowed and forbidden requests, and harmful load."""
