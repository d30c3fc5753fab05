"""Schedules a drafter: selects the sessions for the next drafting pass, and the blocks to send.

Inputs are messages from routers (Open, Close), messages from targets (verdicts, draft requests, hidden states), and the
proposals of a drafting method. Outputs are passes for the method (`DraftingPass`) and messages, mostly blocks. A
drafter also drafts ahead of verdicts, and gives up sessions when most of its blocks are late.

Start with `scheduler`. `session_table` synchronizes the sessions (`draft_sequence`) with their targets. `method`
defines the interface of drafting methods, and `requests` the values exchanged with them. `draft_state` is a block in
progress, and `trees` selects its nodes. `lookahead` drafts blocks ahead of verdicts. `hidden_state_receiver` receives
the hidden states for draft heads.
"""
