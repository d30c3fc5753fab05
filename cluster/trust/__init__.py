"""Who is who on the wire, and who may do what: roles, proofs of assignment, and what becomes of those refused."""
