"""Candidate tokens and their probabilities: possible outcomes of a verdict, and the tokens that make a draft tree.

`outcomes.py` lists the verdicts that a block under verification may bring, from the draft model's own probabilities.
`tree_growth.py` selects the likeliest paths under a budget of nodes (EAGLE-2).
"""
