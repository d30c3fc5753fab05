"""What a drafter decides with: its scheduler, what methods are asked for, and how long their passes take."""
