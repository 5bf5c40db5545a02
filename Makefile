# Everything works from a clean clone with Python 3.11+ and make; the environment is .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Systems to be compared with have an environment of their own.
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed

.PHONY: install check test browser demo man matrix redteam upgrade slurm containers kubernetes gpu-acceptance chaos endurance fuzz mutants evaluation tour bench soak drill takeover bench-recovery stragglers sick packages lock sbom resolve megatron-lm compare object-store versions canary lint clean help

help:
	@echo "make demo     train, break, heal, tell the story (under 3 minutes)"
	@echo "make test     lint, types, layers and the whole test suite"
	@echo "make check    in under 90 seconds: lint, types, layers, the house, pure cores, 25 seeds, what a change touches"
	@echo "make install  only the environment"
	@echo "make chaos    20 random SIGKILLs of worker, node, coordinator and nats-server; all must heal"
	@echo "make endurance  100 faults of every kind, two at once among them, in one run; then nothing may tell of them"
	@echo "make fuzz     10,000 seeded histories of faults against the real cores (docs/design/simulation.md)"
	@echo "make mutants  does the fuzzer catch deliberate bugs?"
	@echo "make evaluation  run every study of docs/results/evaluation.md again (UNICRON_TRACE_FILE: the real trace)"
	@echo "make tour     docs/one-failure.md anew: one failure through the code, recorded under a tracer"
	@echo "make redteam  what a node, a task, a token or a stranger may try (docs/operate/security.md), against real servers and processes; then 200 histories with nodes that lie"
	@echo "make upgrade  rolling upgrades in mid-training, to a version with one more schema and back, in every order"
	@echo "make matrix   a fault at every point of an iteration, every row of the error table, links cut (many minutes)"
	@echo "make megatron-lm  Megatron-LM, unmodified, in every layout, beside itself under torchrun (docs/use/megatron-lm.md)"
	@echo "make compare  FLAGS=\"--bf16 ...\": any flags of Megatron-LM, alone under torchrun against a task with a SIGKILL, in one table (OPTIONS=--help)"
	@echo "make object-store  checkpoints in S3, of moto's server (asks the package index)"
	@echo "make versions  the trainer's tests and the demo with each set of Python, megatron-core and torch (docs/use/versions.md; ROW: one of them)"
	@echo "make canary   what of the newest megatron-core's names, signatures and attributes the trainer would miss, by name (asks the package index)"
	@echo "make gpu-acceptance  the CUDA, NCCL and NVML paths on this machine's GPUs, two or more (docs/use/gpu.md)"
	@echo "make bench    benchmarks (docs/results/benchmarks.md)"
	@echo "make soak     2,000 agents against a real coordinator and nats-server for an hour, with faults (SOAK: other options)"
	@echo "make drill    three hosts (network namespaces), deploy/nats: a head, NATS servers and a node die (docs/operate/heads.md)"
	@echo "make takeover  how soon a second head decides, with 4 and with 2,000 nodes (about 20 minutes)"
	@echo "make slurm    deploy/slurm on a real Slurm of four nodes on this machine (needs slurmctld, slurmd, munge)"
	@echo "make containers  head and agents as process 1 of real containers, as deploy/kubernetes has them (root; runc, debootstrap, bindfs)"
	@echo "make kubernetes  overlays of deploy/kubernetes on a real Kubernetes of this machine, and faults (root; UNICRON_KUBERNETES: the folder of its programs)"
	@echo "make stragglers  how soon slow replicas are told of, and who is told of in an hour without any (about 100 minutes)"
	@echo "make sick     bits that flip, a replica that is slow, a rank that hangs inside its replica: a small part of each"
	@echo "make bench-recovery  a SIGKILL under unicrond, torchrun and torchft, side by side (about an hour)"
	@echo "make packages  sdist and wheel of unicrond and of unicrond-lab, in dist/"
	@echo "make lock     deploy/locks anew: each version of constraints.txt with the hashes of its files (asks the package index)"
	@echo "make sbom     bills of materials of head, node and make's own environment (CycloneDX), in build/sbom"
	@echo "make resolve  does pip find a set of versions for the base install, each extra and unicrond-lab, and do packages with names of our folders fit beside it? (asks the package index)"
	@echo "make browser  the web page in a real browser (Debian's chromium): its tests, three real nodes, 1,000 nodes and 100,000 events; pictures in build/pictures"
	@echo "make man      manual pages of the four commands, in build/man"
	@echo "make lint     ruff, mypy, import-linter"

install: $(STAMP)

# Nothing without its hash. torch's build for the CPU is taken where pip finds it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS),
# else the index's build, with what it needs of CUDA.
$(STAMP): pyproject.toml $(wildcard deploy/locks/*)
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("unicrond needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	deploy/locks/install $(VENV) torch-cpu || deploy/locks/install $(VENV) cuda
	deploy/locks/install $(VENV) all
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/unicrond demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What starts clusters and measures time runs alone; all else, workers without a cluster and the simulation in its
# virtual time too, by two processes at once.
RIGS := $(addprefix tests/integration/test_,$(addsuffix .py,converted finishing kill_matrix loop_mistakes plain_megatron recipes regroup reshape sharded_optimizer state_sources))
ALONE := $(filter-out $(RIGS),$(wildcard tests/integration/test_*.py))
test: lint
	$(BIN)/pytest -n 2 --dist loadscope $(ALONE:%=--ignore=%)
	$(BIN)/pytest $(ALONE)

# What a change touches first. The contracts run on memory and file logs; `make test` runs them on NATS too.
check: lint
	UNICRON_FUZZ_SEEDS=25 $(BIN)/pytest -q -n 2 --dist loadscope -k "not nats" $$($(BIN)/python -m tests.check)

browser: $(STAMP)
	@command -v "$${UNICRON_CHROMIUM:-chromium}" || { echo "make browser needs chromium: apt-get install chromium"; exit 1; }
	mkdir -p build/pictures
	UNICRON_PICTURES=$(CURDIR)/build/pictures $(BIN)/pytest -m "matrix or not matrix" tests/browser
	$(BIN)/python -m tests.browser.bench --pictures build/pictures

matrix: $(STAMP)
	$(BIN)/pytest -m matrix tests/integration --ignore tests/integration/test_live_faults.py --ignore tests/integration/test_upgrade.py
	$(BIN)/pytest -m "matrix or not matrix" tests/integration/test_live_faults.py

# Row by row of docs/operate/security.md: what each login may have NATS say, on one server and on three; lies; floods of
# a worker, a node and a stranger; the deleted log, a full disk and an archive with a gap; heads and nodes that are heard
# and hear nothing.
REDTEAM := $(addprefix tests/,$(addsuffix .py,\
  $(addprefix events/test_,accounts forgery tls jwt_logins) \
  $(addprefix unicrond/test_,authority access owners own_token connections side_jobs edge_events entry_costs entrance callers) \
  $(addprefix agents/test_,passes floods memory_server) \
  $(addprefix integration/test_,keys lying_node flooding_node deleted_log log_drills one_way_links)) \
  integration/test_daemon.py::test_api_answers_beside_a_thousand_half_requests \
  integration/test_nats_cluster.py::test_log_deleted_on_three_servers_is_restored_under_training)
redteam: $(STAMP)
	$(BIN)/pytest -m "matrix or not matrix" $(REDTEAM)
	$(BIN)/unicron-replay fuzz --seeds 200

megatron-lm: $(STAMP)
	MEGATRON_LM_MUST=1 $(BIN)/pytest -m "megatron_lm or not megatron_lm" tests/megatron_lm

# FLAGS: of Megatron-LM. OPTIONS: of the comparison itself.
compare: $(STAMP)
	@$(BIN)/python -m tests.megatron_lm.compare $(OPTIONS) -- $(FLAGS)

object-store: $(STAMP)
	$(BIN)/pip install --quiet --no-compile --upgrade --target .object-store s3fs "moto[s3]" flask flask-cors
	PYTHONPATH=$(CURDIR)/.object-store $(BIN)/pytest tests/trainer/test_places.py tests/integration/test_object_store.py

# ROW: one of them. KEEP=1: its environment stays. MEGATRON: a checkout in place of the wheel's Megatron-core.
export ROW KEEP MEGATRON
versions: $(STAMP)
	$(BIN)/python -m tests.versions.matrix $(ROW)

canary: $(STAMP)
	$(BIN)/python -m tests.versions.canary

upgrade: $(STAMP)
	$(BIN)/pytest -m "matrix or not matrix" tests/integration/test_upgrade.py

slurm: $(STAMP)
	$(BIN)/pytest -m slurm tests/slurm

containers: $(STAMP)
	$(BIN)/python -m tests.containers.run

kubernetes: $(STAMP)
	$(BIN)/python -m tests.kubernetes.run

gpu-acceptance: $(STAMP)
	$(BIN)/python -m tests.gpu.acceptance

chaos: $(STAMP)
	$(BIN)/python -m tests.integration.chaos --faults 20

endurance: $(STAMP)
	$(BIN)/python -m tests.integration.endurance --faults 100

fuzz: $(STAMP)
	$(BIN)/unicron-replay fuzz --seeds 10000

mutants: $(STAMP)
	$(BIN)/python -m unicrond.replay.simulation.mutants.table

evaluation: $(STAMP)
	$(BIN)/python -m unicrond.replay.evaluation

bench: $(STAMP)
	$(BIN)/pytest tests/benchmarks --benchmark-columns=median,iqr,min,max,rounds

SOAK = --agents 2000 --minutes 60 --faults-per-hour 60
soak: $(STAMP)
	$(BIN)/python -m tests.soak.run $(SOAK) --out soak.json

DRILL = build/drill
drill: $(STAMP)
	rm -rf $(DRILL)
	unshare -rnm $(BIN)/python -m tests.integration.drill $(DRILL)

takeover: $(STAMP)
	$(BIN)/python -m tests.benchmarks.takeover --out takeover.jsonl

stragglers: $(STAMP)
	$(BIN)/python -m tests.benchmarks.stragglers --rounds 3 --calm-s 3600 --out stragglers.jsonl

sick: $(STAMP)
	$(BIN)/python -m tests.benchmarks.corruption --faults 40
	$(BIN)/python -m tests.benchmarks.dealing --replicas 3 --each 4 --factors 2 --when birth
	$(BIN)/pytest -q tests/unicrond/test_flight_recorders.py tests/integration/test_layouts_cluster.py -k "recorded or named"

$(PEERS_STAMP): pyproject.toml $(wildcard deploy/locks/*)
	$(PYTHON) -m venv $(PEERS)
	deploy/locks/install $(PEERS) torch-cpu || deploy/locks/install $(PEERS) cuda
	deploy/locks/install $(PEERS) peers
	$(PEERS)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(PEERS_STAMP)

bench-recovery: $(STAMP) $(PEERS_STAMP)
	[ ! -e bench-recovery.jsonl ] || mv bench-recovery.jsonl bench-recovery-until-$$(date +%Y%m%dT%H%M%S).jsonl
	failed=0; \
	$(BIN)/python -m tests.benchmarks.recovery.measure --peers $(PEERS)/bin || failed=1; \
	$(BIN)/python -m tests.benchmarks.recovery.measure --systems unicrond --ranks 3 --faults node move || failed=1; \
	$(BIN)/python -m tests.benchmarks.recovery.report --plot docs/results/plots/recovery.png || failed=1; \
	exit $$failed

MAN = $(BIN)/argparse-manpage --function parser --manual-title "unicrond manual" --project-name unicrond
tour: $(STAMP)
	$(BIN)/python -m tests.tour

man: $(STAMP)
	$(MAN) --module unicrond.commands.cli --prog unicrond --output build/man/unicrond.1
	$(MAN) --module unicrond.ctl.parser --prog unicronctl --output build/man/unicronctl.1
	$(MAN) --module unicrond.agents.shell.cli --prog unicron-agent --output build/man/unicron-agent.1
	$(MAN) --module unicrond.replay.cli --prog unicron-replay --output build/man/unicron-replay.1

packages: $(STAMP)
	$(BIN)/python -m tests.integration.installation dist

# What makes locks and bills of materials has an environment of its own.
TOOLS := .venv-tools
TOOLS_STAMP := $(TOOLS)/.installed
$(TOOLS_STAMP): deploy/locks/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --require-hashes --only-binary :all: --requirement deploy/locks/tools.txt
	touch $(TOOLS_STAMP)

lock: $(TOOLS_STAMP)
	$(TOOLS)/bin/python -m tests.supply.lock

sbom: $(TOOLS_STAMP)
	$(TOOLS)/bin/python -m tests.supply.sbom build/sbom

resolve: $(STAMP)
	$(BIN)/python -m tests.integration.resolve

clean:
	rm -rf $(VENV) $(PEERS) $(TOOLS) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
