"""OpenAI's Responses, without a memory: what is asked becomes a chat, and what is said becomes items and events."""
