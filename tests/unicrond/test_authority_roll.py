"""The CA of `unicrond tls-init` is replaced in three phases: their order, what is trusted in each, and what a crash
leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.events.certified import now
from unicrond.agents.memory.peer_tokens import BadPass, Credentials
from unicrond.agents.shell.memberships import KnownAuthorities
from unicrond.commands.cli import main
from unicrond.events.nats import server_files
from unicrond.events.nats.login import Login
from unicrond.events.trust import membership_digest as roster
from unicrond.events.trust.certificates import (
    all_certificates,
    authority_name,
    first_certificate,
    is_signed_by,
    names_of,
)
from unicrond.events.trust.keys import Key, make_key, rewrite_key, write_key
from unicrond.events.trust.membership_certificates import make_warrant
from unicrond.events.trust.signing import Signer
from unicrond.intake.config import load
from unicrond.service.trust import authority_roll
from unicrond.service.trust.authority_roll import Phase, nodes_behind
from unicrond.service.trust.node_certificates import authority_of, pem_for_node

PHASES = ("trust", "certificate", "finish")
OUT_OF_TURN = "in phase {}; next comes unicrond tls-init --roll {}"


class Head:
    """A head's directory with the CA that it began with."""

    def __init__(self, directory: Path) -> None:
        self.path, self.tls = directory / "unicron.yaml", directory / "state" / "tls"
        self.path.write_text(f"state_dir: {directory / 'state'}\nnats: {{host: 0.0.0.0}}\n")
        assert main(["tls-init", "--config", str(self.path), "--host", "head.example"]) == 0

    def roll(self, phase: str) -> int:
        """No head runs, so no node is asked."""
        return main(["tls-init", "--config", str(self.path), "--roll", phase, "--unheard"])

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.tls.iterdir() if path.suffix != ".new"}

    def key(self, node: str) -> Key:
        """As `unicrond enroll` makes it now."""
        return make_key(f"agent-{node}")._replace(pem=pem_for_node(load(self.path), node))

    def is_sound(self) -> bool:
        """The CA has its key, and the head's certificate is of a CA that is trusted."""
        certificate = first_certificate((self.tls / "server.pem").read_bytes())
        trusted = all_certificates((self.tls / "ca.pem").read_bytes())
        assert authority_of(load(self.path)).certificate in trusted
        return any(is_signed_by(certificate, authority) for authority in trusted)


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path)


def test_three_phases_replace_ca(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    (old,) = all_certificates((head.tls / "ca.pem").read_bytes())
    names = names_of(first_certificate((head.tls / "server.pem").read_bytes()))
    assert head.roll("status") == 0 and "--roll trust begins" in capsys.readouterr().out
    trusted, signing = [], []
    for phase in PHASES:
        assert head.roll(phase) == 0
        text = capsys.readouterr().out
        assert ("enroll" in text) and (phase == "finish" or f"Phase {phase}:" in text)
        trusted.append(all_certificates((head.tls / "ca.pem").read_bytes()))
        signing.append(authority_of(load(head.path)).certificate)
        assert head.is_sound()
        before = head.files()
        assert head.roll(phase) == head.roll("status") == 0 and head.files() == before, "repeated"
        capsys.readouterr()
    (new,) = trusted[2]
    assert new != old and trusted[:2] == [[old, new]] * 2 and signing == [old, new, new]
    shown = first_certificate((head.tls / "server.pem").read_bytes())
    assert is_signed_by(shown, new) and names_of(shown) == names
    assert {file.name: file.stat().st_mode & 0o777 for file in head.tls.iterdir()} == dict.fromkeys(
        ("ca.key", "ca.pem", "server.pem"), 0o600
    )
    assert main(["tls-init", "--config", str(head.path), "--renew"]) == 0 and head.is_sound()


@pytest.mark.parametrize(
    ("done", "asked", "refusal"),
    [
        (0, "certificate", OUT_OF_TURN.format("none", "trust")),
        (1, "finish", OUT_OF_TURN.format("trust", "certificate")),
        (2, "trust", OUT_OF_TURN.format("certificate", "finish")),
        (3, "certificate", OUT_OF_TURN.format("none", "trust")),
    ],
)
def test_phase_out_of_turn_is_refused_with_next_one(
    head: Head, capsys: pytest.CaptureFixture[str], done: int, asked: str, refusal: str
) -> None:
    for phase in PHASES[:done]:
        assert head.roll(phase) == 0
    before = head.files()
    assert head.roll(asked) == 2 and refusal in capsys.readouterr().err
    assert head.files() == before


@pytest.mark.parametrize(
    ("phase", "authorities", "signs_for_nats", "reason"),
    [
        (Phase.TRUST, None, True, "not heard"),
        (Phase.TRUST, (), True, "its agent is of a version that does not say"),
        (Phase.TRUST, ("old", "old"), False, "without the new CA"),
        (Phase.TRUST, ("old", "old", "new"), True, ""),
        (Phase.TRUST, ("", "old"), True, "without the new CA"),
        (Phase.TRUST, ("", "servers"), False, ""),
        (Phase.TRUST, ("", "old", "new"), True, ""),
        (Phase.CERTIFICATE, ("old", "old", "new"), False, "with a certificate of the old CA"),
        (Phase.CERTIFICATE, ("new", "old", "new"), True, ""),
        (Phase.CERTIFICATE, ("", "old", "new"), True, ""),
        (Phase.CERTIFICATE, ("", "old"), True, "without the new CA"),
    ],
)
def test_phase_ends_when_node_has_what_next_one_needs(
    phase: Phase, authorities: tuple[str, ...] | None, signs_for_nats: bool, reason: str
) -> None:
    behind = nodes_behind(phase, "new", {"n1": authorities}, signs_for_nats=signs_for_nats)
    assert behind == ([f"n1 ({reason})"] if reason else [])


def test_phase_is_refused_where_no_head_tells_of_nodes(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    assert head.roll("trust") == 0
    before = head.files()
    assert main(["tls-init", "--config", str(head.path), "--roll", "certificate"]) == 2
    assert "no head tells which nodes have the new CA" in capsys.readouterr().err
    assert head.files() == before and head.roll("certificate") == 0


def test_agent_tells_authorities_of_its_key(head: Head, tmp_path: Path) -> None:
    path, people = tmp_path / "n1.key", tmp_path / "ca.pem"
    write_key(path, head.key("n1"))
    shutil.copy(head.tls / "ca.pem", people)
    of_key, of_ca = KnownAuthorities(Login(key=path)), KnownAuthorities(Login(user="u", tls_ca=people))
    (old,) = map(authority_name, all_certificates(people.read_bytes()))
    assert (of_key(), of_ca(), KnownAuthorities(Login())()) == ((old, old), ("", old), ("",))
    assert head.roll("trust") == 0
    _, new = map(authority_name, all_certificates((head.tls / "ca.pem").read_bytes()))
    assert of_key() == (old, old)
    rewrite_key(path, head.key("n1"))
    assert of_key() == (old, old, new)
    assert head.roll("certificate") == 0
    rewrite_key(path, head.key("n1"))
    assert of_key() == (new, old, new)
    path.write_text("nonsense")
    assert of_key() == (new, old, new)


def test_roll_needs_ca_of_tls_init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unicron.yaml").write_text(f"state_dir: {tmp_path / 'state'}\n")
    assert main(["tls-init", "--config", str(tmp_path / "unicron.yaml"), "--roll", "trust"]) == 2
    assert "run `unicrond tls-init` first" in capsys.readouterr().err


@pytest.mark.parametrize("copied", [PHASES, PHASES[1:]], ids=" ".join)
def test_head_with_copied_files_replaces_ca_again(
    head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str], copied: tuple[str, ...]
) -> None:
    """A copy deletes nothing: what an earlier roll has left in the copy's directory is in no phase of the next one."""
    (tmp_path / "other").mkdir()
    other = Head(tmp_path / "other")
    for phases in (PHASES, copied):
        for phase in PHASES:
            assert head.roll(phase) == 0
            if phase in phases:
                shutil.copytree(head.tls, other.tls, dirs_exist_ok=True)
                capsys.readouterr()
                assert head.roll("status") == 0
                text = capsys.readouterr().out.replace(str(head.tls), str(other.tls))
                assert other.roll("status") == 0 and capsys.readouterr().out == text, phase
    left = {path.read_bytes() for path in other.tls.glob("*.key")}
    (old,) = all_certificates((other.tls / "ca.pem").read_bytes())
    for phase in PHASES:
        assert other.roll(phase) == 0 and other.is_sound()
    assert old not in all_certificates((other.tls / "ca.pem").read_bytes())
    assert not left & {path.read_bytes() for path in other.tls.glob("*.key")}


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("phase", PHASES)
def test_crash_between_two_files_loses_nothing(head: Head, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """Before each file that the phase replaces: what is there is sound, and the phase can be repeated."""
    for earlier in PHASES[: PHASES.index(phase)]:
        assert head.roll(earlier) == 0
    shutil.copytree(head.tls, head.tls.with_name("before"))
    replace = Path.replace
    for number in range(10):
        shutil.rmtree(head.tls)
        shutil.copytree(head.tls.with_name("before"), head.tls)
        left = number

        def crashing(path: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return replace(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", crashing)
            try:
                code = head.roll(phase)
            except Crash:
                code = None
        assert head.is_sound()
        if code == 0:
            break
        assert head.roll(phase) == 0 and head.is_sound()
    assert code == 0 and number == {"trust": 2, "certificate": 2, "finish": 1}[phase]
    assert authority_roll.replace is server_files.replace


def shown(head: Head, path: Path, key: Key, *, by: bytes) -> Callable[[Credentials], tuple[str, int]]:
    """A pass of n1 to n2, with a warrant that the head's certificate `by` signs."""
    credentials = Credentials(key, path)
    text = make_warrant(Signer(by), "a", 3, roster.root(("n1", "n2")), now())
    warrant = f"{text}.{roster.place_of('n1', ('n1', 'n2'))}"
    passes = credentials.passes(("n2",), "a", warrant, now()).of("n2")
    return lambda other: other.admit(passes, "a")


def test_agents_take_new_ca_from_their_keys_file(head: Head, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nodes change one after another, phase by phase: each admits each. With the new CA alone in its key a node refuses
    the old certificate, and the warrants that it signed."""
    path, other_path = tmp_path / "n1.key", tmp_path / "n2.key"
    key, other_key = head.key("n1"), head.key("n2")
    write_key(path, key)
    write_key(other_path, other_key)
    other, old_server = Credentials(other_key, other_path), (head.tls / "server.pem").read_bytes()
    old_context = other.context()
    assert other.context() is old_context
    for phase in PHASES[:2]:
        old = shown(head, path, key, by=old_server)
        assert head.roll(phase) == 0
        assert old(other) == ("n1", 3)
        rewrite_key(other_path, head.key("n2"))
        assert old(other) == ("n1", 3), "n2 is enrolled again, n1 is not yet"
        key = head.key("n1")
        rewrite_key(path, key)
        new = shown(head, path, key, by=(head.tls / "server.pem").read_bytes())
        assert new(other) == ("n1", 3) and shown(head, path, key, by=old_server)(other) == ("n1", 3)
    assert other.context() is not old_context
    assert head.roll("finish") == 0
    rewrite_key(other_path, head.key("n2"))
    assert new(other) == ("n1", 3)
    with pytest.raises(BadPass, match="the certificate of the warrant is of another CA"):
        shown(head, path, key, by=old_server)(other)
    for bad in (make_key("agent-n2"), head.key("n3")):
        rewrite_key(other_path, bad)
        assert new(other) == ("n1", 3), "what it had before"
    assert caplog.text.count("the one before stays in use") == 2
