"""A Megatron-LM command line as data: which task it describes, and in which layouts it can be restarted.

Use `command_line` and `layouts`. Nothing here imports Megatron; what runs inside it lives in
`agents/trainer/megatron`.
"""
