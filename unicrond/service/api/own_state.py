"""A state as scope `read-own` sees it: one owner's tasks, and of everything else the nodes' names, slots and types.

Rules
-----
* What is seen is named here; what is not named is not seen. A field that the state gets is hidden until somebody adds
  it.
* A node has its name, slots, type of GPU and whether it takes workers: no address, key, login or reason. Its
  memory has none of the tokens, since it is not there.
* An incident is seen if it hit one of the owner's tasks since that was submitted. One that hit another's as well tells
  what it did to the owner's alone: its words, its worker, its output and its stacks may be the other's.
* Nothing here is an estimate: what follows from other people's tasks (what goes before a task that waits) is not said.

Pure. What does not live here: who may ask (access.py), what is hidden from everybody (redaction.py).
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from unicrond.core.state.node_parts import AgentIdentity, Cordon, Isolation
from unicrond.core.state.state import ClusterState, Incident, Node, Plan, Task
from unicrond.core.state.work_ledger import Ledger
from unicrond.core.tasks.quotas import EACH_OWNER
from unicrond.events.vocabulary import StoreAddress
from unicrond.events.vocabulary.phrases import task_of

#: Where a node's own value would say more than its name and slots.
_HIDDEN_STORE = StoreAddress(host="-", port=1)


def own_state(state: ClusterState, owner: str) -> ClusterState:
    """Return what the owner sees of the state."""
    tasks = {name: task for name, task in state.tasks.items() if task.owner == owner}
    plan = state.plan
    quotas = {name: workers for name, workers in state.quotas.items() if name in (owner, EACH_OWNER)}
    return ClusterState(
        seq=state.seq,
        now_us=state.now_us,
        term=state.term,
        schema=state.schema,
        mode=state.mode,
        severity=state.severity,
        nodes={name: _own_node(node) for name, node in state.nodes.items()},
        tasks=tasks,
        incidents={incident.id: incident for incident in _own_incidents(state.incidents.values(), tasks)},
        closed_incidents=tuple(_own_incidents(state.closed_incidents, tasks)),
        plan=Plan(
            epoch=plan.epoch,
            assignments={name: share for name, share in plan.assignments.items() if name in tasks},
            adopted_us=plan.adopted_us,
            healthy={name: workers for name, workers in plan.healthy.items() if name in tasks},
            healthy_gpus={name: gpu for name, gpu in plan.healthy_gpus.items() if name in tasks},
        ),
        ledger=Ledger(accounts={name: account for name, account in state.ledger.accounts.items() if name in tasks}),
        holds={key: hold for key, hold in state.holds.items() if hold.task in tasks},
        quotas=quotas,
    )


def own_worker(state: ClusterState, task: str, worker: str) -> bool:
    """Return whether a worker is known to be of this life of an owner's task: one that runs, a member, or one that an
    incident names. `state`: the owner's."""
    life = state.tasks[task]
    members = life.membership.members if life.membership is not None else ()
    names = [*life.workers, *(member.worker for member in members)]
    return worker in names or any(worker == incident.worker for incident in _incidents(state))


def _incidents(state: ClusterState) -> list[Incident]:
    return [*state.closed_incidents, *state.incidents.values()]


def _own_node(node: Node) -> Node:
    return Node(
        name=node.name,
        status=node.status,
        slots=node.slots,
        slots_max=node.slots_max,
        address="-",
        store=_HIDDEN_STORE,
        agent=AgentIdentity(boot=0),
        joined_us=node.joined_us,
        gpu=node.gpu,
        cordon=Cordon(active=node.cordon.active, draining=node.cordon.draining),
        isolation=Isolation(active=node.isolation.active),
    )


def _own_incidents(incidents: Collection[Incident], tasks: dict[str, Task]) -> list[Incident]:
    """Return the incidents that hit one of the tasks since it was submitted, and nothing of others in them."""
    visible = []
    for incident in incidents:
        hits = [name for name in incident.generations if _is_hit(incident, tasks.get(name))]
        if hits and len(hits) == len(incident.generations) and _is_of(incident, hits):
            visible.append(incident)
        elif hits:
            visible.append(_part_of(incident, hits))
    return visible


def _is_hit(incident: Incident, task: Task | None) -> bool:
    return task is not None and incident.detected_us >= task.submitted_us


def _is_of(incident: Incident, tasks: Collection[str]) -> bool:
    """Return whether all workers that the incident names are of these tasks."""
    workers = [incident.worker, *incident.lost_peers, *incident.lost_peers.values(), *incident.links]
    workers += [worker for names in (*incident.stacks.values(), *incident.links.values()) for worker in names]
    return all(task_of(worker) in tasks for worker in workers if worker)


def _part_of(incident: Incident, tasks: Collection[str]) -> Incident:
    """Return what an incident of several owners did to these tasks."""
    return replace(
        incident,
        worker="",
        generations={name: incident.generations[name] for name in tasks},
        message=f"{incident.kind}, which hit others' tasks as well",
        log_tail="",
        place="",
        lost_peers={},
        links={},
        micro_batches_finished={},
        stacks={},
    )
