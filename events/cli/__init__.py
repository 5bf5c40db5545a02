"""The four commands' common parser: flags as values, times and names as types, exit codes, environment variables.

Use `command_line` and `environment_flags`. Each command's own flags live with the command.
"""
