"""Decisions of a drafter: which sessions to draft for in the next pass, and which of the drafted blocks to send.

Input: Open and Close messages from routers, verdicts, draft requests and hidden states from targets, and the proposals
of a drafting method. Output: passes for the method (`DraftingPass`) and messages to send, mostly blocks. Drafters also
draft ahead, before a verdict arrives, and refuse sessions when most of their blocks are late.

Start with `scheduler.py`. `session_table.py` keeps the sessions in step with their targets, `method.py` is the
interface of drafting methods, `lookahead.py` is the search for blocks ahead of verdicts and `draft_state.py` a block in
progress.
"""
