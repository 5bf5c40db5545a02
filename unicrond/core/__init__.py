"""The pure core: what the log means (`fold`, `state`) and what follows from it (`decide`, `planning`).

The spine is four files: `fold`, `decide`, `replayer`, `own_decisions`. Rooms, from the ground up: `state`,
`planning`, `faults`, `tasks`, `nodes`, `worth` (WAF and costs), `rules` (questions that fold and decide both ask),
`folding`, `deciding`. No clock, no input, no output: time is data. What is only shown lives in `unicrond/views`.
"""
