"""Drafts of a model with another tokenizer than the target.

`pairing` decides whether a pair shares token ids or must be translated. `text_tokens` reads tokenizers, and `noise`
finds the target's noise for draft tokens. The translation itself is in `cluster/drafting/translation.py`.
"""
