"""Target replica logic: plans each step's sessions and draft blocks, and turns the outcomes into verdicts.

Inputs are messages from routers (Open, Close) and drafters (Attach, blocks), and the engine's outcomes. Outputs are a
`StepPlan` for the engine, and verdicts, draft requests and hidden states to send. The target verifies a block only if
the block's length and prefix hash match the session's text, so a wrong or late block only reduces speed.

Start with `scheduler`: `plan` precedes each step of the engine; `commit` and `settle` follow it, and messages arrive in
between. `step` defines plans and outcomes. `admission` assigns cache pages. `sequence` is the state of one session, and
`block_buffer` stores its waiting blocks. `hidden_state_sender` sends hidden states to drafters.
"""
