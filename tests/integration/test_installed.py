"""Installed from a wheel, elsewhere, every command works, and says which extra it lacks where it does not."""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.integration import installation
from tests.integration.installation import LABORATORY, LINKED, ROOT, UNICROND, files_of, must, run, source_files
from unicrond import VERSION
from unicrond.events.host import optional_dependencies as extras

COMMANDS = ("unicrond", "unicronctl", "unicron-agent", "unicron-replay")
LOG = ROOT / "tests" / "golden" / "log_v1.bin"
#: The rooms of unicrond-lab, and what only its package needs.
ROOMS = ("replay/simulation/", "replay/evaluation/")
BESIDE_THE_ROOMS = ("replay/pyproject.toml", "replay/README.md", "replay/LICENSE")
#: Of no use to who unpacks an sdist.
NOT_SHIPPED = (".ci/", ".github/", ".git-blame-ignore-revs", ".gitignore")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return installation.build(tmp_path_factory.mktemp("unicrond"))


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return installation.build(tmp_path_factory.mktemp("laboratory"), LABORATORY)


def metadata_of(wheel: Path) -> str:
    return next(text.decode() for name, text in files_of(wheel).items() if name.endswith("METADATA"))


@pytest.fixture(scope="module")
def metadata(built: tuple[Path, Path]) -> str:
    return metadata_of(built[1])


@pytest.fixture(scope="module")
def whole(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with everything."""
    commands = installation.install(built[1], tmp_path_factory.mktemp("whole") / "env", installation.SITE)
    (commands / "nats-server").symlink_to(Path(sys.executable).parent / "nats-server")
    return commands


@pytest.fixture(scope="module")
def base(built: tuple[Path, Path], metadata: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment without any extra."""
    directory = tmp_path_factory.mktemp("base")
    dependencies = installation.shown(installation.required(metadata), directory / "dependencies")
    return installation.install(built[1], directory / "env", dependencies)


@pytest.fixture
def studying(built: tuple[Path, Path], laboratory: tuple[Path, Path], metadata: str, tmp_path: Path) -> Path:
    """The commands of an environment with unicrond-lab and what it asks for."""
    asked = installation.required(metadata) + installation.required(metadata_of(laboratory[1]))
    commands = installation.install(
        built[1], tmp_path / "studying", installation.shown(asked, tmp_path / "dependencies")
    )
    installation.pip(commands, "install", "--no-deps", "--no-index", laboratory[1])
    return commands


def packed(wheel: Path) -> set[str]:
    return {name for name in files_of(wheel) if ".dist-info/" not in name}


def test_wheel_has_every_source_file_but_the_laboratory_and_only_the_package_unicrond(
    built: tuple[Path, Path],
) -> None:
    below = [name for name in source_files() if name.split("/")[0] in ("unicrond", *LINKED)]
    own = [name for name in below if not name.startswith((*ROOMS, *BESIDE_THE_ROOMS))]
    sources = {name if name.startswith("unicrond/") else f"unicrond/{name}" for name in own}
    links = {f"unicrond/{name}" for name in (*LINKED, "docs")}
    documents = {f"unicrond/{name}" for name in source_files() if name.startswith("docs/") and name.endswith(".md")}
    assert packed(built[1]) == (sources - links) | documents, "the links are folders in the wheel"


def test_wheel_of_the_laboratory_has_its_two_rooms_and_a_folder_of_its_own(laboratory: tuple[Path, Path]) -> None:
    sources = {name.replace("replay/", "unicrond_lab/", 1) for name in source_files() if name.startswith(ROOMS)}
    assert packed(laboratory[1]) == sources


def test_laboratory_requires_unicrond_of_the_same_version(metadata: str, laboratory: tuple[Path, Path]) -> None:
    of_the_laboratory = metadata_of(laboratory[1])
    assert f"\nVersion: {VERSION}\n" in metadata and f"\nVersion: {VERSION}\n" in of_the_laboratory
    assert f"\nRequires-Dist: unicrond=={VERSION}\n" in of_the_laboratory
    planning = installation.required(metadata, "head")
    assert set(installation.required(of_the_laboratory)) <= set(planning), "what the planner asks for"


@pytest.mark.parametrize("project", [UNICROND, LABORATORY])
def test_wheel_made_from_the_sdist_is_the_wheel_made_from_the_tree(
    project: str, built: tuple[Path, Path], laboratory: tuple[Path, Path], tmp_path: Path
) -> None:
    from_sdist = built[1] if project == UNICROND else laboratory[1]
    assert files_of(installation.build_from_tree(tmp_path, project)) == files_of(from_sdist)


def test_the_sdist_has_every_file_that_documents_and_tests_need_once(built: tuple[Path, Path]) -> None:
    names = set(files_of(built[0]))
    needed = {name for name in source_files() if not name.startswith(NOT_SHIPPED)}
    links = (*LINKED, "docs")
    assert not needed - names - {f"unicrond/{name}" for name in links}, "a file is missing"
    assert not [name for name in names if name.startswith(tuple(f"unicrond/{link}/" for link in links))], "twice"


def test_command_starts_from_wheel(whole: Path, tmp_path: Path) -> None:
    for command in COMMANDS:
        assert must(whole / command, "--help", cwd=tmp_path).startswith(f"usage: {command}")


@pytest.mark.timeout(300)
def test_demo_heals_from_wheel(whole: Path, tmp_path: Path) -> None:
    picture = tmp_path / "losses.svg"
    done = run(whole / "unicrond", "demo", "--dir", tmp_path / "demo", "--out", picture, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all healed" in done.stdout
    assert "(equal)" in done.stdout
    assert "process_exit" in done.stdout and "node_lost" in done.stdout
    assert "0 of 4 nodes are up" in done.stdout and str(picture) in done.stdout, "it says what it waits for"
    assert picture.read_text().count("SIGKILL of") == 2


def test_replay_reads_logs_without_extras(base: Path, tmp_path: Path) -> None:
    expected = must(sys.executable, "-m", "unicrond.replay.cli", "digest", "--log", LOG, cwd=ROOT)
    assert must(base / "unicron-replay", "digest", "--log", LOG, cwd=tmp_path) == expected
    for command in ("state", "events", "timeline", "story node n1", "diff 1 20", "export copy.log"):
        must(base / "unicron-replay", *command.split(), "--log", LOG, cwd=tmp_path)
    must(base / "unicron-replay", "import", "copy.log", "--into", "copy", cwd=tmp_path)


def test_unicronctl_works_without_extras(base: Path, tmp_path: Path) -> None:
    assert "docs/operate/runbook.md" in must(base / "unicronctl", "explain", "node_lost", cwd=tmp_path)
    decoded = run(base / "unicronctl", "events", "decode", cwd=tmp_path, input="")
    assert decoded.returncode == 0 and not decoded.stderr
    for command in ("status", "nodes", "tasks", "watch", "events", f"submit {ROOT / 'examples' / 'big.yaml'}"):
        done = run(base / "unicronctl", *command.split(), "--url", "http://127.0.0.1:9", cwd=tmp_path)
        assert done.returncode == 1 and "no coordinator at" in done.stderr, f"{command}: {done.stderr}"


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("unicrond run", "head"),
        ("unicrond dev", "all"),
        ("unicrond demo", "all"),
        ("unicron-agent --nats nats://127.0.0.1:9 --node n1 --slots 1 --run-dir run", "node"),
        (f"unicron-replay verify --log {LOG}", "head"),
        (f"unicron-replay whatif --log {LOG}", "head"),
        ("unicronctl plan solve problem.yaml", "head"),
        ("unicronctl plan table --at 1 --url http://127.0.0.1:9", "head"),
        ("unicronctl throughput --model gpt3-7b", "head"),
    ],
)
def test_command_names_missing_extra_in_one_line(command: str, extra: str, base: Path, tmp_path: Path) -> None:
    program, *arguments = command.split()
    done = run(base / program, *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and f"needs the extra `{extra}`" in done.stderr, done.stderr
    assert done.stderr.endswith(f"pip install 'unicrond[{extra}]'\n")


@pytest.mark.parametrize("command", ["fuzz --seeds 1", "simulate --trace mtbf:10d --cluster a800-80g:4x8"])
def test_command_of_the_laboratory_says_what_to_install(command: str, base: Path, tmp_path: Path) -> None:
    name, *arguments = command.split()
    assert name in must(base / "unicron-replay", "--help", cwd=tmp_path)
    assert f"pip install unicrond-lab=={VERSION}" in must(base / "unicron-replay", "simulate", "--help", cwd=tmp_path)
    done = run(base / "unicron-replay", name, *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    missing = f"unicron-replay: unicron-replay {name} needs the package unicrond-lab, which is not installed"
    assert done.stderr == f"{missing}: pip install unicrond-lab=={VERSION}\n"


def test_laboratory_works_beside_unicrond_and_leaves_nothing(studying: Path, tmp_path: Path) -> None:
    assert "every rule held" in must(
        studying / "unicron-replay", "fuzz", "--seeds", "2", "--processes", "2", cwd=tmp_path
    )
    assert "unicron-stay" in must(studying / "unicron-replay", "simulate", "--help", cwd=tmp_path)
    installation.pip(studying, "uninstall", "--yes", "unicrond-lab")
    site = next((studying.parent / "lib").glob("python*/site-packages"))
    assert not [path for path in site.glob("unicrond_lab*/**/*") if path.is_file()]
    must(studying / "unicron-replay", "digest", "--log", LOG, cwd=tmp_path)


def test_laboratory_of_another_version_is_refused(studying: Path, tmp_path: Path) -> None:
    site = next((studying.parent / "lib").glob("python*/site-packages"))
    described = next(site.glob("unicrond_lab-*.dist-info")) / "METADATA"
    described.write_text(described.read_text().replace(f"\nVersion: {VERSION}\n", "\nVersion: 0.0.9\n"))
    done = run(studying / "unicron-replay", "fuzz", cwd=tmp_path)
    assert done.returncode == 1
    assert f"needs unicrond-lab {VERSION} (0.0.9 is installed): pip install unicrond-lab=={VERSION}\n" in done.stderr


def test_extras_provide_what_commands_need(metadata: str) -> None:
    brought_by = packages_distributions()
    for extra, modules in extras.MODULES.items():
        required = {canonicalize_name(Requirement(text).name) for text in installation.required(metadata, extra)}
        for root in (module.partition(".")[0] for module in modules):
            names = {
                canonicalize_name(name) for name in brought_by.get(root, [root])
            }  # s3fs is not in this environment
            assert names & required, f"{extra} does not bring {root}"


def test_foreign_package_with_name_of_our_folder_changes_nothing(built: tuple[Path, Path], tmp_path: Path) -> None:
    commands = installation.install(built[1], tmp_path / "env", installation.SITE)
    foreign = tmp_path / "openai_agents-1.0-py3-none-any.whl"
    with zipfile.ZipFile(foreign, "w") as wheel:
        wheel.writestr("agents/__init__.py", "raise SystemExit('a stranger ran')\n")
        wheel.writestr(
            "openai_agents-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: openai-agents\nVersion: 1.0\n"
        )
        wheel.writestr(
            "openai_agents-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("openai_agents-1.0.dist-info/RECORD", "agents/__init__.py,,\n")
    installation.pip(commands, "install", "--no-deps", "--no-index", foreign)
    for command in COMMANDS:
        must(commands / command, "--help", cwd=tmp_path)
    stranger = run(commands / "python", "-P", "-c", "import agents", cwd=tmp_path)
    assert "a stranger ran" in stranger.stderr, "the other project's package is there, and is the other project's"
