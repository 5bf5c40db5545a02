"""What may befall a MiniCluster, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tests.unicrond.cluster import MiniCluster
from unicrond.core.replayer import steps
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry


def trained(seed: int, nodes: int = 4, slots: int = 1) -> MiniCluster:
    """Two tasks that have everything the plan gives them."""
    cluster = MiniCluster(seed)
    for number in range(nodes):
        cluster.add_host(f"n{number}", slots)
    cluster.submit("big", weight=2.0, max_workers=3)
    cluster.submit("small", max_workers=3)
    cluster.run()
    return cluster


def states_of(entries: Sequence[Entry]) -> list[ClusterState]:
    """The state after each entry."""
    return [step.after for step in steps(entries)]


def random_life(cluster: MiniCluster, seed: int, blows: int = 12, *, falls: bool = False) -> Iterator[None]:
    """Workers and nodes die, come back, are cordoned; a coordinator restarts; between blows some of it heals.

    `falls`: groups that form may go on from a stored state; tasks come, and get other weights and priorities."""
    draw = random.Random(seed)
    for blow in range(blows):
        if falls:
            _fall_back(cluster, draw)
            _change_tasks(cluster, draw, blow)
        match draw.randrange(8):
            case 0 | 1:
                alive = [(h, w) for h in cluster.hosts.values() if h.up for w in h.processes]
                if alive:
                    cluster.kill_worker(*draw.choice(alive))
            case 2:
                up = [h for h in cluster.hosts.values() if h.up]
                if len(up) > 1:
                    host = draw.choice(up)
                    cluster.kill_host(host)
                    cluster.lose(host)
            case 3:
                down = [h for h in cluster.hosts.values() if not h.up]
                if down:
                    cluster.add_host(draw.choice(down).name)
            case 4:
                cluster.take_over()
            case 5:
                cluster.add_host(draw.choice([h.name for h in cluster.hosts.values() if h.up]))  # agent restart
            case 6:
                cluster.now_us += draw.randrange(3_000_000)  # time passes
            case 7:
                node = draw.choice(list(cluster.hosts))
                if cluster.state.nodes[node].cordon.active:
                    cluster.uncordon(node)
                else:
                    cluster.cordon(node, drain=draw.random() < 0.5)
        yield
        for _ in range(draw.randrange(6)):
            moves = cluster.moves()
            draw.choice(moves)()
            yield
        for task in ("big", "small"):
            for _ in range(draw.choice((1, 1, 12))):
                cluster.train(task)
        yield
        if draw.random() < 0.4:
            cluster.run()
            yield


def _fall_back(cluster: MiniCluster, draw: random.Random) -> None:
    """Whoever forms a group next has an older state than the last commit, or the newest one again."""
    cluster.source = draw.choice(("own", "replica", "memory", "peer", "checkpoint", "init"))
    for task in cluster.state.tasks.values():
        if draw.random() < 0.8 and not task.confirmed:
            iteration = cluster.iterations.get(task.name, 0)
            cluster.iterations[task.name] = max(0, iteration - draw.randrange(20))


def _change_tasks(cluster: MiniCluster, draw: random.Random, blow: int) -> None:
    """A task comes, or one gets another weight or priority."""
    match draw.randrange(6):
        case 0:
            least = draw.randrange(1, 3)
            cluster.submit(f"extra{blow}", weight=draw.choice((0.01, 1.0, 30.0)), min_workers=least, max_workers=3)
        case 1:
            update = v.TaskUpdated(task="big", weight=draw.choice((0.1, 2.0, 9.0)), reason="drawn")
            cluster.append(update, "api", cluster.state.term)
        case 2:
            update = v.TaskUpdated(task="small", priority=draw.randrange(3), reason="drawn")
            cluster.append(update, "api", cluster.state.term)
