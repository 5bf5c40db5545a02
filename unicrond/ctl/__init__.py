"""`unicronctl`: its flags, its commands, its client of the HTTP API.

`parser` (with `task_parser`, `node_parser`) has every flag, `commands.COMMANDS` every function, `client` every request.
The text of a story is made in `unicrond/views/accounts.py`, tables in `unicrond/display`.
"""
