"""What `--help` shows, by command."""

from __future__ import annotations

EXAMPLES = {
    "": """\
examples:
  unicron-replay state --file incident.log --at 1234
  unicron-replay digest --nats nats://127.0.0.1:4222
  unicron-replay export incident.log --state-dir unicron-state
  unicron-replay events --file incident.log --node n1 --after -10m

--at, --after and --until take a sequence number (1234), a time with its zone (2026-11-20T09:30:00Z), or a span
before the log's newest entry (-10m; units ms, s, m, h, d).""",
    "state": """\
examples:
  unicron-replay state --nats nats://127.0.0.1:4222
  unicron-replay state --file incident.log --at 1234
  unicron-replay state --file incident.log --at -10m --json | jq .state.plan""",
    "digest": """\
examples:
  unicron-replay digest --nats nats://127.0.0.1:4222
  unicron-replay digest --file incident.log --at 1234 --json

Two logs that agree up to an entry have the same digest there; so have the daemon and its log.""",
    "export": """\
examples:
  unicron-replay export incident.log --nats nats://127.0.0.1:4222
  unicron-replay export first-hour.log --state-dir unicron-state --at 2026-11-20T10:00:00Z

The file holds the tasks' arguments and environment: read it before you pass it on.""",
    "events": """\
examples:
  unicron-replay events --file incident.log --type NodeLost --type PlanAdopted
  unicron-replay events --nats nats://127.0.0.1:4222 --task big --after -10m
  unicron-replay events --file incident.log --after 100 --until 200 --json

--node and --task take every event that names the node or task, also inside a plan or a membership.""",
    "view": """\
examples:
  unicron-replay view spans --file incident.log
  unicron-replay view goodput --state-dir unicron-state --at -10m --json | jq .cluster

A head gives the same of its own log: GET /v1/views/NAME.""",
    "verify": """\
examples:
  unicron-replay verify --state-dir unicron-state
  unicron-replay verify --file incident.log --json

Exit code 1 at the first decision that this version, with the recorded inputs, would make differently. Node losses
are derived again from the heartbeats while they are kept (10 minutes in NATS, always in an export).""",
    "import": """\
examples:
  unicron-replay import incident.log --into copy              # segments in a new directory, for --file
  unicron-replay import incident.log --nats nats://127.0.0.1:4333

The server must be a fresh one, started for this (nats-server -js -sd /tmp/nats -p 4333): where a stream of ours
exists, nothing is written. Imported logs are marked, and coordinators refuse them. NATS dates what it stores, so
there the recorded times are those of the import; --into keeps them.""",
    "diff": """\
examples:
  unicron-replay diff 100 200 --file incident.log
  unicron-replay diff -10m -0s --state-dir unicron-state
  unicron-replay diff 500 500 --file here.log --other there.log --json""",
    "compare": """\
examples:
  unicron-replay compare big again --state-dir unicron-state
  unicron-replay compare big big --file here.log --other there.log --json

Exit code 1 where they differ. Both runs of a task with `numerics: fixed` have the same bits, whatever failed in either:
compared are losses, and checksums of the gradients' sums and of the parameters, of the iterations that both logs
name.""",
    "story": """\
examples:
  unicron-replay story i52 --file incident.log
  unicron-replay story node:n1 --state-dir unicron-state
  unicron-replay story task:big --url http://head:7470 --token-file token --at -10m
  unicron-replay story plan:7 --file incident.log

SUBJECT is the name of a node or task, the id of an incident (i52), or the epoch of a plan; with its kind and a
colon before it where a name means several things.""",
    "timeline": """\
examples:
  unicron-replay timeline --file incident.log
  unicron-replay timeline --file incident.log --html incident.html
  unicron-replay timeline --state-dir unicron-state --png incident.png      # needs unicrond[plot]""",
    "goodput": """\
examples:
  unicron-replay goodput --file incident.log
  unicron-replay goodput --state-dir unicron-state --after -24h --peak-tflops 989
  unicron-replay goodput --file incident.log --json | jq .cluster

The same numbers as `unicronctl goodput` at the same entry; definitions: docs/operate/goodput.md.""",
    "serve": """\
examples:
  unicron-replay serve incident.log
  unicron-replay serve --state-dir unicron-state --port 0

Open the address that it prints in a browser. It listens on loopback alone, and only reads.""",
    "whatif": """\
examples:
  unicron-replay whatif --file incident.log --at 1234 --set tasks.big.weight=3
  unicron-replay whatif --file incident.log --at -10m --set policy.worker_mtbf_s=86400 --lose n1
  unicron-replay whatif --state-dir unicron-state --add-nodes 2 --gpu h100-80g

The coordinator's own planner decides afresh from that point, once as it was and once with the changes.""",
    "fuzz": """\
examples:
  unicron-replay fuzz --seeds 10000
  unicron-replay fuzz --first-seed 368 --seeds 1              # play one seed again
  unicron-replay fuzz --first-seed 368 --seeds 1 --faults 0,4 # with two of its faults alone

The coordinator and the agents are the real ones; time, networks, disks and processes are simulated. Exit code 1 if
a rule is broken: the first failure is shrunk and printed with the command that repeats it
(docs/design/simulation.md).""",
}
