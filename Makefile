# The whole interface: setup, check, quick, test, test-all, pages, faults, machines, blocks, systemd, prometheus, soak, endurance,
# fuzz, s3, study, mutants, bench, gpu, proto, demo, clean.
export PYTHONSAFEPATH := 1
# Each daemon and worker of a test is a process of its own, and would compile all modules again where this is set.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := control data etcd

.PHONY: setup check quick test test-all pages faults machines blocks image systemd prometheus soak endurance fuzz s3 study mutants bench gpu proto demo clean

setup: $(STAMP)

# TORCH_INDEX=https://download.pytorch.org/whl/cu126 takes torch from there, as for an older driver (docs/gpus.md).
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --index-url $(TORCH_INDEX) torch)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local,dev]'
	@$(BIN)/python -m headway.stages.no_card
	touch $(STAMP)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	MYPYPATH=bench $(BIN)/mypy --num-workers 2 bench/*.py bench/*/*.py

# A minute of what is pure: schedule, optimizers, planner, the simulated cluster, and stages in one process.
QUICK := optim stages/schedule stages/stage/test_exactness.py $(addprefix daemon/,decide plan jobs)

quick: setup
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n 2 --dist worksteal $(addprefix tests/unit/,$(QUICK))

# The second half runs whatever the first one says. It waits more than it computes: three at a time on two cores.
test: setup
	red=0; $(BIN)/python -m pytest -m 'not slow and not gpu' -n 2 --dist worksteal tests/unit tests/fuzz || red=1; \
	    $(BIN)/python -m pytest -m 'not slow and not gpu' -n 3 --dist loadscope --durations=25 \
	    tests/chaos tests/integration tests/machines || red=1; exit $$red

test-all: setup
	$(BIN)/python -m pytest --durations=30

# Half an hour of random faults; make soak SOAK="--seed 7 --jobs 1" has one case again.
soak: export PYTHONPATH := $(CURDIR)
soak: setup
	$(BIN)/python -m tests.chaos.soak $(SOAK)

# One job under a thousand faults, hours long; make endurance ENDURANCE="--faults 60 --mean 5" is short.
endurance: export PYTHONPATH := $(CURDIR)
endurance: setup
	$(BIN)/python -m tests.chaos.endurance $(ENDURANCE)

# Every row of the fault matrix, with the seconds that each took to recover.
faults: setup
	$(BIN)/python -m pytest tests/integration/faults

# Ten minutes of broken input: seven at the boundaries, three at a running cluster.
fuzz: export PYTHONPATH := $(CURDIR)
fuzz: setup
	$(BIN)/python -m tests.fuzz.run --minutes 7 $(FUZZ)
	$(BIN)/python -m tests.fuzz.live --minutes 3

# An S3 server that goes away for a minute in every phase; what it needs beside `setup` comes from the s3 extras.
s3: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[s3,s3-server]'
	$(BIN)/python -m pytest tests/integration/faults/test_s3.py

# Machines as network namespaces, and what networks do to them: root, iproute2 and nftables. `test` has a short form.
machines: setup
	$(BIN)/python -m pytest -v tests/machines

# The blocks of README and docs/deployment.md, word for word, on machines as network namespaces: root and iproute2.
blocks: setup
	$(BIN)/python -m pytest -v tests/machines/test_pages.py tests/integration/cli/test_readme_fine_tuning.py

# The image, built without a container engine: root, unshare and Debian's Python. TORCH_INDEX=… takes torch from elsewhere.
image: setup
	$(BIN)/python -m pytest -v tests/image

# The pages in a headless browser; SHOTS=FOLDER also writes pictures of them. `make test` runs this where Chromium is.
pages: export SHOTS := $(SHOTS)
pages: setup
	@command -v chromium >/dev/null || { echo "needs Chromium: apt-get install chromium" >&2; exit 2; }
	$(BIN)/python -m pytest -s tests/integration/pages

# The service's whole life in a booted systemd: root, systemd-nspawn and Debian's Python. SYSTEMD="-s" shows the figures.
systemd: setup
	$(BIN)/python -m pytest -v tests/booted $(SYSTEMD)

# What ships for Prometheus, tried on Debian's own: metrics, alert rules, every query of the dashboard.
prometheus: setup
	@which prometheus promtool >/dev/null || { echo "apt-get install prometheus brings prometheus and promtool" >&2; exit 1; }
	$(BIN)/python -m pytest -v tests/integration/cli/test_prometheus.py tests/integration/cli/test_metrics.py

# A study of docs/delay.md, in pieces: interrupted, it goes on where it was. STUDY=delay-quick is two minutes of it.
STUDY ?= delay
OF_STUDY := build/study-data $(if $(filter finetune,$(STUDY)),build/pretrained build/tuning-data)
study: $(OF_STUDY)
	$(BIN)/headway study docs/studies/$(STUDY).toml --out docs/studies/$(STUDY)

build/study-data: | setup
	stdlib="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"; \
	    $(BIN)/headway data prepare --out $@ --validation 0.02 "$$stdlib/[!t]*.py" "$$stdlib/[!lst_]*/**/*.py"

build/tuning-data: | setup
	$(BIN)/python -c 'import json, pydoc_data.topics as all; \
	    print(*(json.dumps({"text": text}) for text in all.topics.values()), sep="\n")' > build/topics.jsonl
	$(BIN)/headway data prepare --out $@ --validation 0.1 build/topics.jsonl

build/pretrained: | build/study-data
	$(BIN)/headway reference docs/studies/pretrained.toml --out $@

mutants: setup
	$(BIN)/python tests/mutants/run.py

# Benches import bench/rigs and bench/lines, and the reader of histories from tests/chaos. All run, whatever one misses.
bench: export PYTHONSAFEPATH :=
bench: export PYTHONPATH := $(CURDIR):$(CURDIR)/bench
bench: setup
	missed=; for file in $(wildcard bench/*.py bench/control/*.py); do \
	    $(BIN)/python $$file || missed="$$missed $$file"; done; \
	    if [ -n "$$missed" ]; then echo "a bar was missed, or a bench failed:$$missed" >&2; exit 1; fi

# All that only a card can show: tests/gpu and the figures, as one table and gpu-report/report.json. GPU="--only demo links"
# runs some of it, GPU="--device cpu" the same code without a card. Needs Python, pip and make; without a card it exits with 2.
gpu: export PYTHONSAFEPATH :=
gpu: export PYTHONPATH := $(CURDIR):$(CURDIR)/bench
gpu: setup
	$(BIN)/python -m gpu $(GPU)

proto: setup
	$(BIN)/python -m grpc_tools.protoc -Iheadway/proto=proto --python_out=.typing --pyi_out=.typing \
	    --grpc_python_out=.typing $(PROTOS:%=headway/proto/%.proto)

demo: setup
	$(BIN)/headway demo

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
