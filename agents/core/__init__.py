"""The agent's pure core: `machine.handle(state, input) -> (state, actions)`, and what each input does.

Start at `machine` (rules and table), then `state` (state, inputs, actions); one module per subject of input. No
clock, socket or file here: `agents/shell` has them.
"""
