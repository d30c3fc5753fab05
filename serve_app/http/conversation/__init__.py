"""Conversations: messages and tools into a prompt by the model's chat template, and what it says into its parts."""
