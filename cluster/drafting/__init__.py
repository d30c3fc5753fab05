"""Decisions of a drafter: which sessions to draft for in the next pass, and which of the drafted blocks to send.

Input: Open and Close messages from routers, verdicts, draft requests and hidden states from targets, and the proposals
of a drafting method. Output: passes for the method (`DraftingPass`) and messages to send, mostly blocks. Drafters also
draft ahead, before a verdict arrives, and refuse sessions when most of their blocks are late.

Start with `scheduler`. `session_table` keeps the sessions (`draft_sequence`) in step with their targets. `method` is
the interface of drafting methods, `requests` the values exchanged with one. `draft_state` is a block in progress,
`trees` selects its nodes, `lookahead` searches for blocks ahead of verdicts, and `hidden_state_receiver` orders the
hidden states that draft heads read.
"""
