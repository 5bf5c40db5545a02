"""Thousands of agents against one real coordinator and a real nats-server, for an hour: `make soak`.

* `node`: one node. Its agent is real (core, shell, outbox, heartbeats, commands, a connection of its own); its fork
  server and workers are light: they obey at once.
* `fleet`: a process with many nodes, which takes orders on stdin and reports on stdout.
* `coordinator`: `unicrond run`, with a look at how late its loop is.
* `run`: starts all of it, brings the faults, measures.
* `reading`: what the log itself says afterwards. `report`: figures and plot.
"""
