"""EAGLE heads of all generations, in every layout that they are published in."""
