"""Types of fields: the bounds of every number, the patterns of every name, the values of every choice."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

#: Names become NATS subject tokens and file names: no dots, no spaces, no slashes. (\Z: `$` would let a
#: trailing newline pass.)
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z"
Name: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]
#: A setting of the policy; behind a dot an owner's name, or "*" for all others.
SettingName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}(\.(\*|[A-Za-z0-9][A-Za-z0-9_-]{0,62}))?\Z")
]
NameOrNone: TypeAlias = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,62})?\Z")]
#: One incarnation of a worker process: "<task>.<number>"; a number is never used twice in a task.
WorkerId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\.[0-9]{1,9}\Z")]
WorkerOrNone: TypeAlias = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,62}\.[0-9]{1,9})?\Z")]
#: The public nkey of a user.
PublicKey: TypeAlias = Annotated[str, Meta(pattern=r"^U[A-Z2-7]{55}\Z")]
#: A user of a node, or none.
USER_PATTERN = r"^([a-z_][a-z0-9_.-]{0,31})?\Z"
User: TypeAlias = Annotated[str, Meta(pattern=USER_PATTERN)]
Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
#: A type of GPU, as the presets of the throughput model are named: "h100-80g".
Gpu: TypeAlias = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_.-]{0,62})?\Z")]
LongText: TypeAlias = Annotated[str, Meta(max_length=32768)]
Micros: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
#: Bytes, beats, samples: what is only told, never looped over.
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, lt=2**53)]
#: How long something took; a year and a day at most.
Duration: TypeAlias = Annotated[int, Meta(ge=0, le=366 * 86_400_000_000)]
SomeDuration: TypeAlias = Annotated[int, Meta(ge=1, le=366 * 86_400_000_000)]
#: Workers on one node: its GPUs, or its CPU slots.
#: Workers that one node can have.
SLOTS_MAX = 1024
Slots: TypeAlias = Annotated[int, Meta(ge=1, le=SLOTS_MAX)]
#: Workers of a task or of a cluster, or ranks in it; the largest cluster this is for.
WORKERS_MAX = 131_072
NODES_MAX = 65_536
#: Nodes that one event names: of the longest names they are a tenth of the largest event.
NODES_NAMED_MAX = 1024
#: Users of one node's list, and places that one worker looks for a state in.
USERS_MAX, SOURCES_MAX = 256, 256
Workers: TypeAlias = Annotated[int, Meta(ge=0, le=WORKERS_MAX)]
SomeWorkers: TypeAlias = Annotated[int, Meta(ge=1, le=WORKERS_MAX)]
#: Numbers that are given out one after the other and never again: terms, epochs, generations, replicas.
SERIAL_MAX = 10**9 - 1
Serial: TypeAlias = Annotated[int, Meta(ge=0, le=SERIAL_MAX)]
FirstSerial: TypeAlias = Annotated[int, Meta(ge=1, le=SERIAL_MAX)]
#: A producer's starts, numbered by its wall clock in microseconds where that is higher: up to the year 2112.
Boot: TypeAlias = Annotated[int, Meta(ge=0, lt=2**52)]
Iteration: TypeAlias = Annotated[int, Meta(ge=0, le=10**12)]
FirstIteration: TypeAlias = Annotated[int, Meta(ge=1, le=10**12)]
#: What a task's FLOP/s count for, beside those of other tasks.
Weight: TypeAlias = Annotated[float, Meta(gt=0.0, le=1e6)]
#: Whose floor is met first, as in Slurm and Kubernetes: the higher.
Priority: TypeAlias = Annotated[int, Meta(ge=-1000, le=1000)]
LearningRate: TypeAlias = Annotated[float, Meta(gt=0.0)]
#: Micro-batches, collectives, codes: what fits into 31 bits anywhere.
Small: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Size: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
Pid: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
ExitCode: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Signal: TypeAlias = Annotated[int, Meta(ge=1, le=127)]
#: FLOP/s of a whole cluster: 10,000 GPUs reach 5e18, which is above Count's bound.
Flops: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: A sum of samples' hashes modulo 2**61.
SamplesDigest: TypeAlias = Annotated[int, Meta(ge=0, lt=2**61)]
#: A CA, by the first 8 bytes of its fingerprint (events/trust/certificates.py).
AUTHORITIES_MAX = 16
AuthorityOrNone: TypeAlias = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]
#: How many times as long as others.
Factor: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
#: Weighted FLOP, correctly rounded: months of 10,000 GPUs are beyond 64 bits. The folded state holds the exact sums.
Work: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e40)]
#: A number of the configuration; finite.
Setting: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]
#: "busy": with what the program has declared (hook.section). "done": its part of the task is complete.
Phase: TypeAlias = Literal[
    "start", "forward", "backward", "reduce", "step", "data", "checkpoint", "regroup", "unknown", "busy", "done"
]
#: What went wrong, as far as the reporter can tell. Severity is not here: it is the coordinator's.
ErrorKind: TypeAlias = Literal[
    "node_lost",
    "process_exit",
    "start_failed",
    "connection_broken",
    "collective_timeout",
    "cuda_error",
    "ecc_error",
    "nvlink_error",
    "driver_error",
    "out_of_memory",
    "store_error",
    "data_error",
    "nan_loss",
    "hang",
    "exception",
    "dma_error",
    "illegal_memory_access",
    "nccl_error",
    "corruption",
    "gpu_fault",
    "gpu_broken",
    "left_early",
    "link_fault",
    "head_deaf",
    "domain_lost",
]
#: How a process came to its end: by itself with a code, by a signal, by one with a core dump, or by SIGKILL from the
#: kernel's OOM killer. "maybe_oom_killed": this cannot be found out here, and no other cause is known.
ExitCause: TypeAlias = Literal["unknown", "exited", "signalled", "core_dumped", "oom_killed", "maybe_oom_killed"]
#: What a suspicion of silent corruption rests on.
CorruptionSign: TypeAlias = Literal["loss", "gradient_norm", "checksum", "micro_batch"]
#: By what a program is seen to train something else on each replica, or each time; see DivergenceObserved.
DivergenceSign: TypeAlias = Literal["unsteady", "unequal", "newcomer", "parameters", "environment"]
#: The response that an error kind asks for: 1 reconfigure, 2 restart the process, 3 reattempt in place.
SeverityLevel: TypeAlias = Literal[1, 2, 3]
#: How a plan was computed: looked up in the table, solved with rows of an earlier solution, solved from nothing.
PlanMethod: TypeAlias = Literal["table", "incremental", "fresh"]
#: A fault that a person may order. The last two concern a node, the others a worker; kill either.
FaultKind: TypeAlias = Literal["kill", "stop", "exception", "nan", "slow", "hang", "exit", "oom", "xid", "drop_network"]
#: What the owner of a machine wants of it.
MachineHold: TypeAlias = Literal["", "cordon", "drain"]
#: What broken hardware needs before it is used again, by its vendor's or its driver's word; "other": a word that this
#: version does not know; "": nothing was said.
RepairNeed: TypeAlias = Literal["", "reset", "reboot", "replace", "other"]
#: Where a worker's state came from, nearest first: its own, a live replica, the memory of a member's node, the memory
#: of another node, storage; "init": from the seed.
StateSource: TypeAlias = Literal["own", "replica", "memory", "peer", "checkpoint", "init"]
#: Of the built-in GPT's parameters and activations; gradients and the optimizer's masters are fp32.
Precision: TypeAlias = Literal["fp32", "bf16"]
#: Whose checkpoint it is: unicron's, or one of the program's own.
Saver: TypeAlias = Literal["unicron", "program"]
#: What a task does about states that an earlier run of its name has saved (tasks.py).
StartMode: TypeAlias = Literal["", "resume", "restart", "fork"]
#: Where in an iteration an ordered fault happens; "": at the first chance.
FaultPhase: TypeAlias = Literal["", "forward", "backward", "reduce", "step", "checkpoint", "regroup"]

# Arrays of what agents report, bounded by what a node can have.
NodeNames: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=NODES_MAX)]
Users: TypeAlias = Annotated[tuple[User, ...], Meta(max_length=USERS_MAX)]
ObjectStores: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=16)]
CountByRank: TypeAlias = Annotated[tuple[Small, ...], Meta(max_length=WORKERS_MAX)]
FailedSources: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=SOURCES_MAX)]
