"""What is installed, and where it comes from: the locks, the bill of materials, the image's base.

Lives here: what makes them (`make lock`, `make sbom`) and the tests that hold them to each other. Not here: the check
of the nats-server that is started (`events/nats/server_program.py`).
"""
