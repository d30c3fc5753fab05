"""Decisions of a target replica: the sessions and draft blocks of each step, and the verdicts that follow from it.

Input: Open and Close messages from routers, Attach messages and blocks from drafters, and the engine's outcomes.
Output: a `StepPlan` for the engine, and verdicts, draft requests and hidden states to send. A block is verified only if
its length and prefix hash match the session's own text, so a wrong or late block costs speed, never a token.

Start with `scheduler`: `plan` and `apply` alternate around the engine's step, and messages take effect in between.
`step` defines the plan and the outcomes, `admission` assigns cache pages, `sequence` is one session with its waiting
blocks (`block_buffer`), and `hidden_state_sender` sends hidden states to drafters that read them.
"""
