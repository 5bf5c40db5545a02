"""Faults as data: a history of faults is drawn from a seed, and any part of it can be played.

Rules
-----
* A fault is a row of plain values, so that a history can be printed, and shrunk by leaving rows out.
* Faults begin in the faulty phase; those that last end with it at the latest (`World.heal`).
* Some name a boundary instead of a moment: from then on the victim ends at its next append or act.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec

from unicrond.events.wire.schemas import FIRST, SCHEMA

FAULTY_FROM_S = 4.0
FAULTY_UNTIL_S = 40.0


class SimulatedFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of a history. `at_s` from the beginning, lasting `for_s`; `nodes`: the victims; `how`: by kind; `pick`
    chooses a worker."""

    kind: str
    at_s: float
    for_s: float = 0.0
    nodes: tuple[str, ...] = ()
    how: str = ""
    pick: int = 0

    def __str__(self) -> str:
        where = f" {','.join(self.nodes)}" if self.nodes else ""
        lasting = f" for {self.for_s:.2f} s" if self.for_s else ""
        return f"{self.at_s:6.2f} s  {self.kind}{f' {self.how}' if self.how else ''}{where}{lasting}"


#: The moments at which a worker may die, by the training loop's names (agents/protocol/injection.py); `regrouped`: when
#: it reports that it has joined a group.
_MOMENTS = (
    "computed", "reduced", "agreeing", "stepped", "gathering", "committed", "giving", "dividing", "regrouped",
)  # fmt: skip
Table: TypeAlias = Mapping[str, tuple[int, float, tuple[str, ...], int]]
#: Kind -> (relative frequency; longest duration; values of `how`; the most nodes that are hit at once).
FAULT_KINDS: dict[str, tuple[int, float, tuple[str, ...], int]] = {
    "crash_coordinator": (6, 0.0, ("", "before", "sent", "acknowledged", "part", "part"), 0),
    "second_coordinator": (6, 0.0, ("", "two"), 0),
    "cut_coordinator": (5, 8.0, (), 0),
    "crash_log": (6, 5.0, (), 0),
    "slow_disk": (4, 8.0, ("0.3", "2.0"), 0),
    "forgetful_log": (2, 15.0, (), 0),
    "garbage": (1, 0.0, (), 0),
    "edge_events": (3, 0.0, ("1", "5", "20"), 0),
    "forged_claim": (1, 0.0, ("next", "far"), 0),
    "crash_agent": (6, 0.0, ("", "before", "sent", "acknowledged", "memory", "action0", "action1"), 1),
    "restart_agent": (2, 0.0, (), 1),
    "end_agent": (4, 4.0, ("", "pod", "impatient", "impatient_pod"), 3),
    "change_version": (3, 0.0, (str(FIRST), str(SCHEMA)), 2),
    "agent_away": (1, 20.0, (), 1),
    "second_agent": (3, 15.0, ("", "leaves", "cut"), 1),
    "crash_fork_server": (3, 0.0, (), 1),
    "power_off": (5, 12.0, ("", "", "disk_lost"), 3),
    "kill_worker": (10, 0.0, ("", "", *_MOMENTS), 1),
    "end_early": (2, 0.0, (), 1),
    "hang_worker": (4, 20.0, ("", "stopped", "stuck", "for_ever"), 1),
    "hang_after_join": (3, 15.0, (), 1),
    "raise_in_worker": (2, 0.0, ("exception", "nan_loss", "cuda_error", "ecc_error"), 1),
    "report_error": (2, 0.0, ("store_error", "nccl_error", "collective_timeout", "nvlink_error"), 1),
    "ill_accelerator": (5, 15.0, ("ecc_error", "nvlink_error", "cuda_error", "gpu_broken", "", "foretold"), 1),
    "order_fault": (
        4,
        3.0,
        ("kill", "stop", "hang", "exception", "nan", "exit", "slow", "kill_node", "drop_network"),
        1,
    ),
    "cordon": (4, 15.0, ("", "drain", "by"), 2),
    "maintain": (4, 10.0, ("", "", "cancelled"), 2),
    "reset_group": (4, 0.0, (), 1),
    "sick_links": (3, 12.0, (), 1),
    "break_links": (3, 15.0, (), 2),
    "break_worker_line": (2, 0.0, (), 1),
    "break_fork_line": (2, 0.0, (), 1),
    "cut_log": (6, 15.0, (), 3),
    "cut_peers": (3, 12.0, (), 1),
    "isolate": (3, 12.0, (), 2),
    "bad_weather": (5, 15.0, ("loss", "repeats", "delay", "all"), 5),
    "step_clock": (3, 10.0, ("3600", "-3600", "20", "-20"), 1),
    "step_log_clock": (2, 10.0, ("3600", "-3600", "20", "-20"), 0),
    "redeliver": (3, 0.0, (), 1),
    "disk_full": (2, 10.0, (), 1),
    "leave": (2, 10.0, (), 1),
    "cancel": (1, 0.0, (), 0),
    "reshape": (2, 0.0, ("1 1", "2 1", "1 2"), 0),
}

#: What people and their programs bring, likewise: drawn for some seeds only, beside the history or in place of it.
PROGRAM_KINDS: dict[str, tuple[int, float, tuple[str, ...], int]] = {
    "bad_program": (8, 0.0, ("raise_at_start", "raise", "nan", "hang", "leave", "leak"), 0),
    "flood": (2, 16.0, (), 0),
    "slow_node": (3, 15.0, ("1.3", "2", "4"), 1),
}
#: What hits many nodes by one cause, likewise.
OUTAGE_KINDS: dict[str, tuple[int, float, tuple[str, ...], int]] = {
    "all_silent": (1, 20.0, ("", "", "head_anew"), 0),
}
#: What shares a cause, likewise: all nodes of one domain are lost, and come back; "late": one after the other.
DOMAIN_KINDS: Table = {"domain_down": (1, 15.0, ("", "late", "cut"), 0)}
#: The share of seeds in which a domain is lost, and of these the share in which nothing else goes wrong.
DOMAINS, DOMAINS_ALONE = 0.2, 0.5
#: The share of seeds with outages, and of these the share in which nothing else goes wrong.
OUTAGES, OUTAGES_ALONE = 0.15, 0.5
#: Likewise: people have the cluster, or a task, observed for a time.
MODE_KINDS: dict[str, tuple[int, float, tuple[str, ...], int]] = {"observe": (1, 20.0, ("", "task"), 0)}
#: The share of seeds in which they do.
OBSERVED = 0.2
#: Likewise: a node that carries nothing lies about everything.
LIAR_KINDS: dict[str, tuple[int, float, tuple[str, ...], int]] = {"lying_node": (1, 10.0, ("3", "20", "60"), 0)}
#: The share of seeds in which one does.
LIARS = 0.2
#: Likewise: a replica has other bits than the rest, again and again: its node's chip computes wrongly, or the program
#: differs, now here, now there.
BITS_KINDS: Table = {"other_bits": (1, 25.0, ("chip", "program"), 1)}
#: The share of seeds in which one has.
OTHER_BITS = 0.15
#: Likewise: one says as much in each event as its type allows.
LARGE_KINDS: Table = {"large_events": (1, 10.0, ("3", "12"), 0)}
#: The share of seeds in which one does.
LARGE = 0.1
#: Likewise: links that carry one way only, of a node to the log, or between nodes.
ONE_WAY_KINDS: Table = {"cut_log": (3, 15.0, ("hears", "is_heard"), 2), "cut_peers": (2, 12.0, ("one_way",), 2)}
#: The share of seeds with such links, and of these the share in which nothing else goes wrong.
ONE_WAY, ONE_WAY_ALONE = 0.15, 0.5
#: The share of seeds in which nothing goes wrong, but a node is slow all the time.
SLOW = 0.05
#: Of FAULT_KINDS, those in which nothing of the cluster fails.
CALM_KINDS = ("cordon", "maintain", "end_agent", "cancel")
#: The share of seeds whose people bring garbage, and of these the share in which nothing else goes wrong.
GARBAGE, ALONE = 0.25, 0.6


def history_of(rng_of: Callable[[str], random.Random], nodes: list[str]) -> list[SimulatedFault]:
    """Draw the whole history of a seed: its faults, and in some seeds outages, links that carry one way only, or what
    people and programs bring."""
    speeds = rng_of("speeds")
    if speeds.random() < SLOW:
        lasts_s, how = FAULTY_UNTIL_S - FAULTY_FROM_S, speeds.choice(("2", "4"))
        victims = (speeds.choice(nodes),)
        return [SimulatedFault(kind="slow_node", at_s=FAULTY_FROM_S, for_s=lasts_s, nodes=victims, how=how)]
    faults, ways = _history_of(rng_of, nodes), rng_of("links")
    if ways.random() >= ONE_WAY:
        return faults
    faults = [] if ways.random() < ONE_WAY_ALONE else faults
    return sorted(faults + _draw(ways, ONE_WAY_KINDS, ways.randint(1, 2), nodes), key=lambda fault: fault.at_s)


def _history_of(rng_of: Callable[[str], random.Random], nodes: list[str]) -> list[SimulatedFault]:
    rng = rng_of("programs")
    faults = draw(rng_of("faults"), nodes)
    domains = rng_of("domains")
    if domains.random() < DOMAINS:
        faults = [] if domains.random() < DOMAINS_ALONE else faults
        faults = sorted([*faults, *_draw(domains, DOMAIN_KINDS, 1, nodes)], key=lambda fault: fault.at_s)
    modes = rng_of("modes")
    if modes.random() < OBSERVED:
        faults = sorted([*faults, *_draw(modes, MODE_KINDS, 1, nodes)], key=lambda fault: fault.at_s)
    lies = rng_of("lies")
    if lies.random() < LIARS:
        faults = sorted([*faults, *_draw(lies, LIAR_KINDS, 1, nodes)], key=lambda fault: fault.at_s)
    bits = rng_of("bits")
    if bits.random() < OTHER_BITS:
        faults = sorted([*faults, *_draw(bits, BITS_KINDS, 1, nodes)], key=lambda fault: fault.at_s)
    large = rng_of("large events")
    if large.random() < LARGE:
        faults = sorted([*faults, *_draw(large, LARGE_KINDS, 1, nodes)], key=lambda fault: fault.at_s)
    if rng.random() >= GARBAGE:
        return _with_outages(rng_of("outages"), faults, nodes)
    calm = {kind: FAULT_KINDS[kind] for kind in CALM_KINDS}
    if rng.random() < ALONE:
        faults = _draw(rng, calm, rng.randint(0, 3), nodes)
    faults += _draw(rng, PROGRAM_KINDS, rng.randint(1, 4), nodes)
    return sorted(faults, key=lambda fault: fault.at_s)


def _with_outages(rng: random.Random, faults: list[SimulatedFault], nodes: list[str]) -> list[SimulatedFault]:
    if rng.random() >= OUTAGES:
        return faults
    faults = [] if rng.random() < OUTAGES_ALONE else faults
    return sorted(faults + _draw(rng, OUTAGE_KINDS, rng.randint(1, 2), nodes), key=lambda fault: fault.at_s)


def is_calm(faults: Iterable[SimulatedFault]) -> bool:
    """Return whether nothing of the cluster itself fails in the history."""
    return all(fault.kind in CALM_KINDS or fault.kind in PROGRAM_KINDS for fault in faults)


def is_one_way(fault: SimulatedFault) -> bool:
    """Return whether the fault is a link that carries one way only."""
    return fault.kind in ONE_WAY_KINDS and fault.how in ONE_WAY_KINDS[fault.kind][2]


def draw(rng: random.Random, nodes: list[str]) -> list[SimulatedFault]:
    """Draw a history for the faulty phase, in order of time."""
    return _draw(rng, FAULT_KINDS, rng.randint(2, 12), nodes)


def _draw(rng: random.Random, table: Table, count: int, nodes: list[str]) -> list[SimulatedFault]:
    kinds = list(table)
    weights = [table[kind][0] for kind in kinds]
    faults = []
    for kind in rng.choices(kinds, weights, k=count):
        _, longest_s, hows, most = table[kind]
        victims = min(len(nodes), 1 if rng.random() < 0.7 else most) if most else 0
        faults.append(
            SimulatedFault(
                kind=kind,
                at_s=round(rng.uniform(FAULTY_FROM_S, FAULTY_UNTIL_S - 2.0), 3),
                for_s=round(rng.uniform(0.1, longest_s), 3) if longest_s else 0.0,
                nodes=tuple(sorted(rng.sample(nodes, victims))),
                how=rng.choice(hows) if hows else "",
                pick=rng.randint(0, 5),
            )
        )
    return sorted(faults, key=lambda fault: fault.at_s)
