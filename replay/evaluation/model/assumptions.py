"""The numbers that a simulation assumes, by name: `--assume NAME=VALUE` changes one, the write-up prints them all.

Where a number comes from: *paper* = Unicron (arXiv 2401.00134), as recalled, not re-checked; *assumed* = ours,
fixed before any result was looked at, and varied in the sensitivity tables of docs/results/evaluation.md.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0.0, le=1e7)]
Ratio = Annotated[float, Meta(gt=0.0, le=1.0)]
Nodes = Annotated[float, Meta(ge=0.0, le=1e6)]


class Assumptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The assumptions of a simulation. Times in seconds.

    Shared by all systems
    `checkpoint_load_s`: reading a checkpoint from remote storage (assumed).
    `recompute_s`: training done again after a step back to the last checkpoint: half of an interval of
    30 min (paper).

    Unicron: the coordinator's core is the real one; these are its agents and trainers
    `node_detect_s`, `process_detect_s`, `error_detect_s`: from the fault until it is on the log (paper).
    `command_s`: from a decision to the worker that obeys it (assumed).
    `start_s`: a new process until its model is built, the others train meanwhile (assumed).
    `stop_s`: a process until it is gone and its slot is free (assumed).
    `regroup_s`: forming the communicators of a new membership, without training (assumed).
    `redeal_s`: computing a lost replica's micro-batches of the iteration again (assumed).
    `transfer_s`: moving parameters and optimizer state to new members or a new layout (assumed).

    Megatron with a person and a queue behind it: megatron-wait, megatron-shrink, hot-spare
    `timeout_s`: until the collective's timeout ends the job (paper).
    `requeue_s`: until the job is scheduled again (paper). `setup_s`: until it trains again (paper).

    Oobleck, Varuna, Bamboo, ReCycle
    `elastic_detect_s`: a broken connection or missed heartbeat (assumed).
    `rebuild_s`: a new form, state not included, where the mechanism cannot help any more (assumed).
    `oobleck_reinstantiate_s`: new pipelines from templates, layers copied from other replicas (assumed).
    `varuna_morph_s`: restart in a new configuration (assumed); `varuna_recompute_s`: since its last,
    frequent, checkpoint (assumed).
    `bamboo_failover_s`: the shadow takes over (assumed). `bamboo_reconfigure_s`: pipelines are built anew (assumed).
    `recycle_reroute_s`: micro-batches are dealt otherwise (assumed). `recycle_join_s`: a node copies its stage
    (assumed).
    `oobleck_ratio`, `varuna_ratio`, `bamboo_ratio`: failure-free throughput over Megatron's as published. That it is a
    fraction is the Unicron paper's; 1/2.5 for all three is assumed. No run uses them: they stand beside the ratio that
    the mechanism's computed price leaves.

    Fault-tolerant HSDP (arXiv 2602.00277)
    `ft_hsdp_stall_s`: all replicas stand still when one drops out, detection included (published: 3 minutes).
    `ft_hsdp_restart_s`: a replica until it trains again (assumed: the 10 minutes published for a restart of all).
    `ft_hsdp_replica_nodes`: nodes of a replica; 0 = the fewest on which the task trains (assumed).
    """

    checkpoint_load_s: Seconds = 60.0
    recompute_s: Seconds = 900.0

    node_detect_s: Seconds = 5.6
    process_detect_s: Seconds = 1.8
    error_detect_s: Seconds = 0.3
    command_s: Seconds = 0.05
    start_s: Seconds = 60.0
    stop_s: Seconds = 5.0
    regroup_s: Seconds = 15.0
    redeal_s: Seconds = 5.0
    transfer_s: Seconds = 15.0

    timeout_s: Seconds = 1800.0
    requeue_s: Seconds = 540.0
    setup_s: Seconds = 840.0

    elastic_detect_s: Seconds = 30.0
    oobleck_reinstantiate_s: Seconds = 60.0
    varuna_morph_s: Seconds = 300.0
    varuna_recompute_s: Seconds = 300.0
    bamboo_failover_s: Seconds = 30.0
    bamboo_reconfigure_s: Seconds = 120.0
    rebuild_s: Seconds = 300.0
    recycle_reroute_s: Seconds = 10.0
    recycle_join_s: Seconds = 30.0
    ft_hsdp_stall_s: Seconds = 180.0
    ft_hsdp_restart_s: Seconds = 600.0
    ft_hsdp_replica_nodes: Nodes = 0.0
    oobleck_ratio: Ratio = 0.4
    varuna_ratio: Ratio = 0.4
    bamboo_ratio: Ratio = 0.4


DEFAULTS = Assumptions()


def assume(settings: dict[str, str]) -> Assumptions:
    """Return the defaults with `settings` (name -> number as text). Raises ValueError that names the setting and the
    fix."""
    values = msgspec.to_builtins(DEFAULTS)
    for name, text in settings.items():
        if name not in values:
            raise ValueError(f"--assume {name}: unknown; choose from {', '.join(values)}")
        try:
            values[name] = float(text)
            msgspec.convert(values, Assumptions)
        except (ValueError, msgspec.ValidationError):
            bounds = {"ratio": "a ratio above 0, at most 1", "nodes": "nodes from 0 to 1e6"}
            bound = bounds.get(name.rpartition("_")[2], "seconds from 0 to 1e7")
            raise ValueError(f"--assume {name}: {text!r} does not fit; give {bound}") from None
    return msgspec.convert(values, Assumptions)
