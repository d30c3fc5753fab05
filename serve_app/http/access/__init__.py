"""Who may ask over HTTP, and how much: keys, and what each of them is allowed."""
