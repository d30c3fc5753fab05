"""Identity and permissions between processes and of clients: roles, proofs of assignment, API keys, and refusals.

Input: the names in a peer's certificate, tickets, and settings. Output: whether a peer or key may do something, and
counts of what was refused, logged once per peer and cause. Start with `roles.py` and `assignment_tokens.py`;
`options.py` and `api_keys.py` are the settings.
"""
