"""`unicronctl`: its flags, its commands, its client of the HTTP API."""
