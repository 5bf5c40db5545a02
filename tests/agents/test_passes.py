"""The exchange of states in TLS: who gets in, with which pass, and who reads along."""

from __future__ import annotations

import dataclasses
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from tests.agents.node import NODE, Node, membership
from tests.events.certified import Certified, now
from tests.integration.memory_nodes import OtherNode
from unicrond.agents.memory import server as memory_server
from unicrond.agents.memory.peer_tokens import VALID_S, BadPass, Credentials, read_pass
from unicrond.agents.memory.server import RequestSlots
from unicrond.agents.protocol import memory_exchange
from unicrond.agents.protocol.framing import Unframer, frame
from unicrond.agents.protocol.memory import Memory, StateHead, digest_of
from unicrond.agents.protocol.memory_exchange import ExchangeFailed, Fetching, ask, push
from unicrond.agents.protocol.messages import GroupMembership, Passes
from unicrond.agents.shell.memberships import Memberships, credentials_of
from unicrond.agents.shell.options import Options
from unicrond.events.nats.connection import Login
from unicrond.events.queries.worker_queries import WarrantRenewal
from unicrond.events.trust import membership_digest as roster
from unicrond.events.trust.certificates import BadCertificate
from unicrond.events.trust.keys import make_key, write_key
from unicrond.events.trust.membership_certificates import make_warrant
from unicrond.events.trust.signing import Signer
from unicrond.events.vocabulary import MemoryService, StoreAddress
from unicrond.events.vocabulary.shape import Shape

STATE = b"state of the task" * 1000
MEMBERS = ("n1", "n3", "n4")
Warrant: TypeAlias = Callable[..., str]


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    return Certified(tmp_path)


def credentials(certified: Certified, node: str) -> Credentials:
    path, key = certified.key(f"agent-{node}")
    return Credentials(key, path)


@pytest.fixture
def warrant(certified: Certified) -> Callable[..., str]:
    """With a node's place, as its agent keeps it. `by`: PEM of who signs."""

    def made(
        node: str = "n1",
        nodes: Collection[str] = MEMBERS,
        task: str = "a",
        generation: int = 1,
        *,
        by: bytes = b"",
        at: datetime | None = None,
    ) -> str:
        signer = Signer(by or certified.server.read_bytes())
        text = make_warrant(signer, task, generation, roster.root(nodes), at or now())
        return f"{text}.{roster.place_of(node, nodes)}"

    return made


def shown(of: Credentials, warrant: str = "", peer: str = "n2", task: str = "a") -> Passes:
    return of.passes((peer,), task, warrant, now())


# --- passes --------------------------------------------------------------------------------------


def test_pass_is_valid_for_one_peer_and_task(certified: Certified, warrant: Warrant) -> None:
    n1, n2, n3 = (credentials(certified, node) for node in ("n1", "n2", "n3"))
    passes = shown(n1, warrant(generation=4))
    text = passes.of("n2")
    assert len(text) <= 2500 and passes.of("n3") == ""
    assert n2.admit(text, "a") == ("n1", 4)
    with pytest.raises(BadPass, match="the pass is for node n2"):
        n3.admit(text, "a")
    with pytest.raises(BadPass, match="the pass is for task a"):
        n2.admit(text, "b")
    with pytest.raises(BadPass, match="the pass has expired; compare the clocks"):
        n2.admit(text, "a", now() + timedelta(seconds=VALID_S + 2))
    with pytest.raises(BadPass, match="the certificate of node n1 has expired; enroll it again"):
        n2.admit(text, "a", now() + timedelta(days=6))


def test_malformed_pass_is_refused(certified: Certified, tmp_path: Path) -> None:
    n1, n2 = credentials(certified, "n1"), credentials(certified, "n2")
    other = Certified(tmp_path / "other")
    authorities = [certified.authority.certificate]
    text = shown(n1).of("n2")
    for bad in ("", "x", "äöü", "tls", "A" * 5000, text[:-8], text[8:]):
        with pytest.raises(BadPass):
            n2.admit(bad, "a")
    with pytest.raises(BadPass, match="is of another CA"):
        n2.admit(shown(credentials(other, "n1")).of("n2"), "a")
    text = text.removesuffix(".")
    for place in range(0, len(text) - 4, 7):  # every changed byte counts
        with pytest.raises(BadPass):
            read_pass(text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :], authorities, now())


def test_pass_must_match_certificate_of_node(certified: Certified) -> None:
    """One with a pass that names another node, signed with its own certificate."""
    n1, n2 = credentials(certified, "n1"), credentials(certified, "n2")
    n1.node = "n3"
    with pytest.raises(BadPass, match="the pass is of node n3, its certificate is not"):
        n2.admit(shown(n1).of("n2"), "a")


def test_head_certificate_is_no_node_certificate(certified: Certified) -> None:
    key = make_key("agent-n1")._replace(pem=certified.server.read_text() + certified.ca.read_text())
    path = certified.directory / "head.key"
    write_key(path, key)
    with pytest.raises(BadCertificate, match="it is not the certificate of a node"):
        Credentials(key, path)
    with pytest.raises(BadCertificate, match="not a private key"):
        Credentials(key._replace(pem=certified.ca.read_text()), path)


# --- warrants ------------------------------------------------------------------------------------


def refusal(of: Credentials, text: str, task: str = "a") -> str:
    with pytest.raises(BadPass) as refused:
        of.admit(text, task)
    return str(refused.value)


def test_foreign_warrant_is_refused(certified: Certified, warrant: Warrant, tmp_path: Path) -> None:
    n1, n2, n5 = (credentials(certified, node) for node in ("n1", "n2", "n5"))
    other = Certified(tmp_path / "other")
    own = n1._path.read_bytes()
    good = warrant()
    signed, _, place = good.partition(".")

    def why(text: str, of: Credentials = n1) -> str:
        return refusal(n2, shown(of, text).of("n2"))

    assert n2.admit(shown(n1, good).of("n2"), "a") == ("n1", 1)
    assert why("") == "node n1 has no warrant for task a"
    assert "is not the place of node n5" in why(good, n5), "it was shown to another node, or to n1's own task"
    invented = roster.place_of("n5", [*MEMBERS, "n5"])
    assert why(f"{signed}.{invented}", n5) == "the warrant is not for node n5"
    assert why(warrant(task="b")) == "the warrant is for task b"
    assert why(warrant(by=own)) == "the warrant is not signed by the head", "a node's certificate is no head's"
    assert why(warrant(by=other.server.read_bytes())) == "the certificate of the warrant is of another CA"
    assert why(shown(n1).of("n2")) == "the signature of the warrant is wrong", "a pass in its place"
    assert "not valid when it made the warrant" in why(warrant(at=now() + timedelta(days=20)))
    for bad in (signed, f"{signed}.", f"{signed}.x", f".{place}", place, f"{signed[:-8]}.{place}", "A" * 9000):
        assert refusal(n2, shown(n1, bad).of("n2"))
    for spot in range(0, len(signed) - 4, 7):
        changed = signed[:spot] + ("A" if signed[spot] != "A" else "B") + signed[spot + 1 :]
        assert refusal(n2, shown(n1, f"{changed}.{place}").of("n2"))


def test_warrant_outlives_its_certificate(certified: Certified, warrant: Warrant) -> None:
    """A membership may stand for months, and the head's certificate is renewed meanwhile."""
    n1, n2 = credentials(certified, "n1"), credentials(certified, "n2")
    certified.serve(begin=now() - timedelta(days=3), days=1)
    made = warrant(at=now() - timedelta(days=2.5))
    assert n2.admit(shown(n1, made).of("n2"), "a") == ("n1", 1)
    assert "not valid when it made" in refusal(n2, shown(n1, warrant()).of("n2"))


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000])
def test_roster_gives_each_node_a_place(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    whole = roster.root(nodes)
    assert whole == roster.root(set(nodes)) and whole != roster.root([*nodes, "m"])
    for node in nodes[:: max(1, count // 20)]:
        assert roster.root_by(roster.place_of(node, nodes), node) == whole
    assert roster.place_of("m", nodes) == ""
    for bad in ("", "x", "AAAA", roster.place_of(nodes[0], nodes)[:-4]):
        with pytest.raises(ValueError, match="it is not a place"):
            roster.root_by(bad, nodes[0])


def test_roster_place_of_many_nodes_fits_into_request() -> None:
    nodes = [f"a-long-name-of-a-node-as-clouds-give-them-{number:06}" for number in range(20_000)]
    assert len(roster.place_of(nodes[-1], nodes)) < 24_000


def test_agent_takes_renewed_warrant_of_its_membership_alone(certified: Certified, warrant: Warrant) -> None:
    node = Node()
    node.tell(membership("a", 3, ["a.1"]), warrant="of the old certificate")
    credentials_here = credentials(certified, NODE)
    memberships = Memberships(lambda: node.state.memory.memberships, credentials_here)
    good, of_next = warrant(nodes=(NODE,), generation=3), warrant(nodes=(NODE,), generation=4)
    signed = good.partition(".")[0]
    assert memberships.problem("a", 3, signed) == ""
    assert memberships.problem("a", 2, signed) == "", "of an older membership none is needed"
    for task, generation in (("a", 4), ("b", 3)):
        ahead = memberships.problem(task, generation, signed)
        assert ahead == f"membership {generation} of task {task} has not come yet", "it is to come again"
    assert memberships.problem("a", 3, "nonsense") == "it is not a warrant"
    assert "of generation 4, not 3" in memberships.problem("a", 3, of_next.partition(".")[0])
    assert "not for node" in memberships.problem("a", 3, warrant("n7", ("n7",), generation=3).partition(".")[0])
    node.feed(WarrantRenewal(task="a", generation=4, warrant=signed))
    assert memberships.warrant("a").startswith("of the old certificate."), "another membership's changes nothing"
    node.feed(WarrantRenewal(task="a", generation=3, warrant=signed))
    assert memberships.warrant("a") == good


def test_worker_gets_passes_with_membership(certified: Certified, warrant: Warrant) -> None:
    """And one of an older version reads what it knows of it."""
    n1, n2 = credentials(certified, "n1"), credentials(certified, "n2")
    service = MemoryService(node="n2", host="127.0.0.1", port=1, token=memory_exchange.TLS)
    store = StoreAddress(host="127.0.0.1", port=1)
    told = GroupMembership(generation=3, members=(), joiners=(), urgent=False, store=store, peers=(service,))
    told = replace(told, warrant=warrant(generation=3))
    message = n1.with_passes(told, "a", now())
    (heard,) = Unframer(GroupMembership).feed(frame(message))
    assert heard == message and heard.passes is not None
    assert n2.admit(heard.passes.of("n2"), "a") == ("n1", 3)
    assert replace(heard, passes=None, warrant=told.warrant) == told


def test_credentials_need_key_with_certificate(certified: Certified, tmp_path: Path) -> None:
    path, _ = certified.key()
    bare, _ = certified.key("agent-n2", certificate=False)
    options = Options(nats=(), node="n1", slots=1, run_dir=tmp_path, login=Login(key=path))
    found = credentials_of(options)
    assert found is not None and found.node == "n1"
    assert credentials_of(dataclasses.replace(options, states_in_clear=True)) is None
    assert credentials_of(dataclasses.replace(options, login=Login(key=bare))) is None
    assert credentials_of(dataclasses.replace(options, login=Login())) is None
    spoilt = tmp_path / "spoilt.key"
    spoilt.write_text(path.read_text().replace("-----BEGIN PRIVATE KEY-----\nM", "-----BEGIN PRIVATE KEY-----\n"))
    spoilt.chmod(0o600)
    with pytest.raises(BadCertificate, match=r"its certificate cannot be used \(.*\); enroll the node again"):
        credentials_of(dataclasses.replace(options, login=Login(key=spoilt)))


# --- the exchange --------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory.private(1 << 20)
    draft = made.draft(len(STATE))
    assert draft is not None
    draft.view[:] = STATE
    draft.seal(7, 1, digest_of(STATE), Shape())
    yield made
    made.close()


def test_state_exchange_uses_tls(certified: Certified, memory: Memory, warrant: Warrant) -> None:
    n1, n2 = credentials(certified, "n1"), credentials(certified, "n2")
    with OtherNode("n2", {0: memory}, n2) as service:
        passes = shown(n1, warrant())
        heads = ask(service, "a", passes)
        assert [head.iteration for head in heads[0]] == [7]
        fetching = Fetching(service, "a", 0, 7, Shape(), passes)
        got = bytearray(fetching.head.size_bytes)
        fetching.receive(memoryview(got))
        assert got == STATE
        newer = StateHead(iteration=8, generation=1, size_bytes=len(STATE), digest=digest_of(STATE))
        push(service, "a", 0, "n1", newer, memoryview(STATE), passes)
        assert [head.iteration for head in ask(service, "a", passes)[0]] == [8, 7]


def test_state_exchange_refuses_bad_peers(
    certified: Certified, memory: Memory, warrant: Warrant, tmp_path: Path
) -> None:
    n1, n2 = credentials(certified, "n1"), credentials(certified, "n2")
    other = Certified(tmp_path / "other")
    head = StateHead(iteration=8, generation=1, size_bytes=len(STATE), digest=digest_of(STATE))

    def refused(why: str, act: Callable[[], object]) -> None:
        with pytest.raises(ExchangeFailed, match=why):
            act()

    good = warrant()
    with OtherNode("n2", {0: memory}, n2) as service:
        refused("over TLS alone, and this node has no certificate: enroll it", lambda: ask(service, "a"))
        refused("refused: the pass is for task a", lambda: ask(service, "b", shown(n1, good)))
        refused("refused: node n1 has no warrant for task a", lambda: ask(service, "a", shown(n1)))
        refused("this node has no pass for node n2", lambda: ask(service, "a", shown(n1, good, "n3")))
        foreign = Passes(ca=shown(n1).ca, by_node=(("n2", shown(credentials(other, "n1")).of("n2")),))
        refused("refused: the certificate of the pass is of another CA", lambda: ask(service, "a", foreign))
        refused("no TLS with node n2", lambda: ask(service, "a", replace(shown(n1, good), ca=other.ca.read_text())))
        refused(
            "node n1 brings a state of node n3",
            lambda: push(service, "a", 0, "n3", head, memoryview(STATE), shown(n1, good)),
        )
        elsewhere = replace(service, node="n3")
        refused("another than node n3 answers there", lambda: ask(elsewhere, "a", shown(n1, good, "n3")))
    with OtherNode("n2", {0: memory}) as service:
        refused("in clear alone, and this node does not: enroll that node", lambda: ask(service, "a", shown(n1, good)))


def test_departed_node_gets_no_later_generation(certified: Certified, memory: Memory, warrant: Warrant) -> None:
    """So it is with one that was revoked: the next membership is without it. Its certificate is as good as before."""
    n1, n2, n3 = (credentials(certified, node) for node in ("n1", "n2", "n3"))
    old, new = shown(n1, warrant()), shown(n3, warrant("n3", ("n3", "n4"), generation=2))
    head = StateHead(iteration=8, generation=1, size_bytes=len(STATE), digest=digest_of(STATE))
    with OtherNode("n2", {0: memory}, n2) as service:
        Fetching(service, "a", 0, 7, Shape(), old).receive(memoryview(bytearray(len(STATE))))
        with pytest.raises(ExchangeFailed, match="generation 2 is later than its warrant's, 1"):
            push(service, "a", 0, "n1", replace(head, generation=2), memoryview(STATE), old)
        push(service, "a", 0, "n3", replace(head, generation=2), memoryview(STATE), new)
        stale = "node n1 has a warrant of generation 1, here is one of 2"
        for act in (
            lambda: ask(service, "a", old),
            lambda: Fetching(service, "a", 0, 7, Shape(), old),
            lambda: push(service, "a", 0, "n1", replace(head, iteration=9), memoryview(STATE), old),
        ):
            with pytest.raises(ExchangeFailed, match=stale):
                act()
        assert [found.iteration for found in ask(service, "a", new)[0]] == [8, 7]


def test_exchange_allows_documented_limits(certified: Certified, memory: Memory, warrant: Warrant) -> None:
    """docs/operate/security.md says so: a member may bring what it likes, and one of before where nothing is kept."""
    n1, n2, n5 = (credentials(certified, node) for node in ("n1", "n2", "n5"))
    false = b"not what was trained"
    head = StateHead(iteration=8, generation=1, size_bytes=len(false), digest=digest_of(false))
    with OtherNode("n2", {0: memory}, n2) as service:
        push(service, "a", 0, "n1", head, memoryview(false), shown(n1, warrant()))
        assert ask(service, "a", shown(n1, warrant()))[0][0].digest == digest_of(false)
    empty = Memory.private(1 << 20)
    with OtherNode("n5", {0: empty}, n5) as service:  # a later generation has n1 no more, but n5 cannot know it
        push(service, "a", 0, "n1", head, memoryview(false), shown(n1, warrant(), "n5"))
        assert empty.newest() == head
    empty.close()


def test_foreign_pass_cannot_be_replayed(certified: Certified, memory: Memory, warrant: Warrant) -> None:
    """Replay: n2 has seen n1's pass and warrant, and so has n1's task."""
    n1, n2, n3 = (credentials(certified, node) for node in ("n1", "n2", "n3"))
    seen, _, place = shown(n1, warrant()).of("n2").partition(".")
    replayed = Passes(ca=n2.ca, by_node=(("n3", seen),), warrant=place)
    with OtherNode("n3", {0: memory}, n3) as service:
        with pytest.raises(ExchangeFailed, match="refused: the pass is for node n2"):
            ask(service, "a", replayed)
        with pytest.raises(ExchangeFailed, match="it is not the place of node n2"):
            ask(service, "a", shown(n2, warrant(), "n3"))


def test_network_traffic_shows_no_state_or_pass(certified: Certified, memory: Memory, warrant: Warrant) -> None:
    name = "a-node-with-a-name"
    n1, n2 = credentials(certified, name), credentials(certified, "n2")
    seen = bytearray()
    with OtherNode("n2", {0: memory}, n2) as service, socket.create_server(("127.0.0.1", 0)) as tap:

        def relay(source: socket.socket, sink: socket.socket) -> None:
            while data := source.recv(65536):
                seen.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        def listen() -> None:
            near, _ = tap.accept()
            with near, socket.create_connection((service.host, service.port)) as far:
                back = threading.Thread(target=relay, args=(far, near))
                back.start()
                relay(near, far)
                back.join()

        listening = threading.Thread(target=listen)
        listening.start()
        passes, port = shown(n1, warrant(name, (name,))), tap.getsockname()[1]
        tapped = MemoryService(node="n2", host="127.0.0.1", port=port, token=service.token)
        fetching = Fetching(tapped, "a", 0, 7, Shape(), passes)
        fetching.receive(memoryview(bytearray(fetching.head.size_bytes)))
        listening.join()
    assert len(seen) > len(STATE)
    assert STATE[:20] not in seen and passes.of("n2").encode()[:20] not in seen
    assert name.encode() not in seen, "not even who asks"


# --- deadlines and caps --------------------------------------------------------------------------


def test_slow_handshake_and_request_time_out(
    certified: Certified, warrant: Warrant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_server, "REQUEST_TIMEOUT_S", 2.0)  # a handshake takes longer on a busy machine
    n1, n2 = credentials(certified, "n1"), credentials(certified, "n2")
    with OtherNode("n2", {}, n2) as service:
        with socket.create_connection((service.host, service.port), 10) as silent:
            assert silent.recv(1) == b""
        context = ssl.create_default_context(cadata=n1.ca)
        context.check_hostname = False
        with context.wrap_socket(socket.create_connection((service.host, service.port), 10)) as dripping:
            ended = threading.Event()
            with pytest.raises((OSError, StopIteration)):
                for byte in bytes([0, 0, 1, 0, *range(100)]):
                    dripping.sendall(bytes([byte]))
                    ended.wait(0.05)
        monkeypatch.undo()
        assert ask(service, "a", shown(n1, warrant())) == {}


def test_slow_transfer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_exchange, "SILENCE_TIMEOUT_S", 0.1)
    near, far = socket.socketpair()
    with near, far, pytest.raises(TimeoutError, match="the other side is too slow"):
        near.settimeout(30)
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.02):
                far.send(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            memory_exchange.read_into(near, memoryview(bytearray(1000)))
        finally:
            stop.set()
            dripping.join()


def test_single_peer_never_takes_all_request_slots() -> None:
    places = RequestSlots(3, 2)
    assert places.take("n1", 0) and places.take("n1", 0)
    assert not places.take("n1", 0.01)
    assert places.take("n2", 0)
    assert not places.take("n3", 0.01), "all are taken"
    places.leave("n1")
    assert places.take("n3", 0) and not places.take("n1", 0)
    places.leave("n3")
    assert places.take("n1", 0)
