# `make demo` and `make test` set up what they need; `make help` lists the rest.
PYTHON ?= python3
RUN := .venv/bin/python
# Tests wait for leases, deadlines and processes, so two workers more than cores keep these busy. Files go out in their
# order: whole systems first, and the many small files of tests/unit fill the end.
CORES := $$(env -u OMP_NUM_THREADS nproc)
PARALLEL := -n $$((2 + $(CORES))) --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1
# Packages are installed uncompiled (deploy/setup_env.py): without their bytecode, each process would compile anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env system-packages demo test test-faults soak test-upgrade test-fleet test-alerts test-ui screenshots test-vllm test-trl trl test-verl verl test-verifiers test-openenv test-integrations quick check sim faultkit fuzz audit bench bench-relay bench-repack bench-learning bench-gateway bench-tools bench-data bench-core bench-gpu images test-images protos reference dashboards format lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env:  ## make .venv (packages are cached outside the checkout, one set for each lock)
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) not found. Install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m deploy.setup_env

system-packages:  ## as root: the Debian packages that tests and benchmarks want and this machine lacks (prints its apt line)
	@$(PYTHON) -m deploy.system_packages

demo: env  ## the main job on this machine: train, publish, refresh, repack, kill, report (ARGS="--seed 2" ...)
	@$(RUN) -m deploy.demo $(ARGS)

test: env  ## the tests of every change, with real processes; some 15 minutes
	@$(RUN) -m pytest tests --ignore=tests/vllm --ignore=tests/trl --ignore=tests/verl --ignore=tests/verifiers --ignore=tests/openenv -m "not long and not upgrade and not alerts and not ui and not fleet and not images" $(PARALLEL) $(ARGS)

test-faults: env  ## relays and etcd away for long, twenty joiners, a slow link, a slow host, more seeds, one after the other (some eight minutes)
	@$(RUN) -m pytest tests/faults tests/sim -m long $(ARGS)

MINUTES ?= 20
SEED ?= 1
soak: env  ## the whole system under load and seeded chaos, judged by clients that know the right answers (MINUTES=20, HOURS=2, SEED=1); bench-results/soak.json
	@$(RUN) -m tests.soak $(if $(HOURS),--hours $(HOURS),--minutes $(MINUTES)) --seed $(SEED) $(ARGS)

test-upgrade: env  ## relays, gateway, SDK and plugins of this release and the one before, which is built from its tag, both ways; some three minutes
	@$(RUN) -m pytest tests/upgrade -m upgrade --show-capture=stdout -rP $(ARGS)

test-fleet: env  ## docs/secured-fleet.md as it stands, from the wheel into an empty environment and HOME, with what pip downloads for it (0.4 GB); some three minutes
	@$(RUN) -m pytest tests/e2e/operating/test_secured_fleet.py -m fleet --show-capture=stdout -rP $(ARGS)

test-alerts: env  ## every alert rule fires from real daemons under a real Prometheus, a minute of the rules taken for a second; some three minutes
	@$(RUN) -m pytest tests/alerts -m alerts $(ARGS)

test-ui: env  ## the dashboard in a real Chromium: what it shows, keys, axe, frames with 5,000 sessions; some two minutes
	@$(RUN) -m pytest tests/ui -m ui --show-capture=stdout -rP $(ARGS)

screenshots: env  ## the pictures of docs/dashboard.md, from a real fleet with 5,000 sessions of made-up agents; some four minutes
	@$(RUN) -m tests.ui.screenshots $(ARGS)

test-vllm: env  ## the same with real vLLM on CPU, installed once (3.5 GB on disk): refresh, moves, kill -9; some ten minutes
	@$(RUN) -m pytest tests/vllm -m vllm $(ARGS)

test-trl: env  ## TRL's trainers on a fleet of this machine, with TRL installed once (1.5 GB on disk); some three minutes
	@$(RUN) -m pytest tests/trl -m trl $(ARGS)

test-verifiers: env  ## environments of the verifiers library by its own vf-eval, installed once (0.6 GB on disk); a minute
	@$(RUN) -m pytest tests/verifiers -m verifiers $(ARGS)

test-integrations: env  ## all programs of others that this works with, each in an environment of its own, and a table (ARGS="trl verl" runs some); some 25 minutes
	@$(RUN) -m tests.integrations $(ARGS)

test-openenv: env  ## environments of OpenEnv behind their own servers, OpenEnv installed once (0.5 GB on disk); two minutes
	@$(RUN) -m pytest tests/openenv -m openenv $(ARGS)

trl: ARGS = grpo
trl: env  ## one TRL trainer on a fleet of this machine, step by step (ARGS=async_grpo, ARGS="grpo --steps 30")
	@$(RUN) -m tests.trl $(ARGS)

test-verl: env  ## verl's weight updates and agent loops on a fleet of this machine, with verl installed once (1.7 GB on disk); three minutes
	@$(RUN) -m pytest tests/verl -m "verl and not long" $(ARGS)

verl: env  ## verl's weight updates and rollouts on a fleet of this machine, and what they printed
	@$(RUN) -m tests.verl $(ARGS)

quick: env  ## the quick part of the tests (a minute on two cores), a fifth of each property's examples
	@$(RUN) -m pytest tests --ignore=tests/vllm --ignore=tests/trl --ignore=tests/verl --ignore=tests/verifiers --ignore=tests/openenv -m "not slow" --hypothesis-profile=quick -n $$((3 + $(CORES))) --dist worksteal $(ARGS)

check: env  ## format, lint with bandit's rules and hadolint, strict types, import directions, generated parts fresh, pages within their words, once a day `make audit`; seconds, no tests
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@.venv/bin/hadolint --config deploy/images/hadolint.yaml deploy/images/Containerfile
	@$(RUN) -m mypy
	@PYTHONPATH=. .venv/bin/lint-imports
	@$(RUN) -m protos.generate --check
	@$(RUN) -m deploy.reference --check
	@$(RUN) -m deploy.words
	@$(RUN) -m deploy.audit --daily

images:  ## the container images, from Debian's packages and this checkout, without a registry: needs buildah and mmdebstrap (ARGS="daemons --help"); some five minutes
	@$(PYTHON) -m deploy.images $(ARGS)

test-images: env  ## as root: what is in those images, and the compose file under a Docker of its own: keys, credentials, publish, one turn; some five minutes
	@$(RUN) -m pytest tests/images -m images --show-capture=stdout -rP $(ARGS)

SEEDS ?= 5000
sim: env  ## the relay tier under virtual time, seeded faults on all cores (SEEDS=5000, some 20 minutes on 2 cores)
	@$(RUN) -m tests.sim --kept --seeds $(SEEDS) $(ARGS)

faultkit: SEEDS = 1000
faultkit: env  ## seeded cuts through the real gateway over HTTP (SEEDS=1000, some three minutes)
	@LAMINAR_FAULTKIT_SEEDS=$(SEEDS) $(RUN) -m pytest tests/faults/test_seeded_cuts.py --show-capture=stdout -rP $(ARGS)

EXAMPLES ?= 50
SEED ?= 1
fuzz: env  ## every port and file that strangers write to: HTTP by schemathesis, which it installs beside .venv, with and without keys; frames, gRPC, etcd, key files (EXAMPLES=50 SEED=1)
	@test -x .venv-fuzz/bin/schemathesis || { $(PYTHON) -m venv .venv-fuzz && .venv-fuzz/bin/pip -q install 'schemathesis>=4.32'; }
	@LAMINAR_FUZZ_EXAMPLES=$(EXAMPLES) LAMINAR_FUZZ_SEED=$(SEED) $(RUN) -m pytest tests/fuzz tests/e2e/test_openapi_fuzz.py --show-capture=stdout -rP $(ARGS)

audit: env  ## known vulnerabilities of requirements.lock, by pip-audit, which it installs beside .venv; needs an advisory service
	@$(RUN) -m deploy.audit

bench-relay: env  ## the relay tier's figures against their bars (ARGS="hop publish" runs parts); some 20 minutes
	@$(RUN) -m tests.bench.relay $(ARGS)

bench-gateway: env  ## the gateway's cost and latency against its peers and bars (ARGS="cpu prefix" runs parts); some 45 minutes
	@$(RUN) -m tests.bench.gateway $(ARGS)

bench-tools: env  ## throughput of sessions that wait for slow tools, over instant tools (a part of bench-gateway); five minutes
	@$(RUN) -m tests.bench.gateway tools

bench-data: env  ## a trainer's batch packed against the same through JSON, and its rate; a minute
	@$(RUN) -m tests.bench.data $(ARGS)

bench-core: env  ## what decisions cost with 1,024 engines and 20,480 turns, against their bars; a minute
	@$(RUN) -m tests.bench.core $(ARGS)

bench-gpu: env  ## publish from a GPU and load onto it, over plain copies (without a GPU it says so and ends well)
	@$(RUN) -m tests.bench.gpu $(ARGS)

bench-repack: env  ## what packing the long tail is worth, through the real gateway; 40 minutes on a quiet machine (ARGS=sweep: batches and publish periods, 49 more; ARGS=--sim: all of it in virtual time, some 10 minutes)
	@$(RUN) -m tests.bench.repack $(ARGS)

bench-learning: env  ## reward against time and tokens in three modes, three seeds each; 40 minutes on a quiet machine, an interrupted one goes on (ARGS="--modes repack --seeds 1")
	@$(RUN) -m tests.bench.learning $(ARGS)

bench: env  ## benchmarks that the project's figures come from; tables, and bench-results/*.json
	@$(RUN) -m tests.bench $(ARGS)

protos: env  ## generate the gRPC code from protos/*.proto
	@$(RUN) -m protos.generate

reference: env  ## write the pages of docs/reference from the code
	@$(RUN) -m deploy.reference

dashboards: env  ## write the Grafana dashboards of deploy/grafana from their table
	@$(RUN) -m deploy.grafana

format: env  ## format, mend what ruff can
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

lock: env  ## requirements.lock with the newest versions that pyproject.toml allows
	@$(PYTHON) -m deploy.lock_env

clean:  ## remove .venv and caches of this checkout (the shared environment stays)
	@rm -rf .venv .venv-vllm .venv-trl .venv-verl .venv-audit .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-report
