"""Candidate tokens with their chances: what verdicts may bring, and which tokens make a tree."""
