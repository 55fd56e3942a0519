# SPDX-License-Identifier: Apache-2.0
# make run | test | plan | status | watch | compare | lint | tables | profiles | clean
# CONFIG=my.yaml and PROFILE=gpu or slurm change run and plan; RUN=name shows one run alone in status and watch;
# RUNS="a b" names those to compare.

PROFILE ?= cpu
CONFIG ?=
RUN ?=
export PATH := $(CURDIR)/.venv/bin:$(PATH)
CLUSTER := $(filter slurm kubernetes,$(PROFILE))
ifneq ($(CLUSTER),)
export PATH := $(CURDIR)/.venv-$(CLUSTER)/bin:$(PATH)
endif
SNAKEMAKE := snakemake --profile profiles/$(PROFILE) $(if $(CONFIG),--configfile $(CONFIG))
ENVIRONMENT := $(if $(filter cpu,$(PROFILE)),cpu,gpu)

.PHONY: run test plan status watch compare lint tables setup profiles clean

run: setup
	$(SNAKEMAKE)

plan: setup
	@python scripts/plan.py $(CONFIG) --hardware $(ENVIRONMENT)

test: setup
	pytest

status: setup
	@python scripts/status.py $(RUN)

watch: setup
	@python scripts/status.py --watch $(RUN)

compare: setup
	@python scripts/compare.py $(RUNS)

lint: setup
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile rules

tables: setup
	PYTHONPATH=scripts:tests python docs/make_tables.py

setup:
	@bash envs/setup.sh $(ENVIRONMENT)
ifneq ($(CLUSTER),)
	@bash envs/setup.sh $(CLUSTER)
endif

profiles:
	@mkdir -p $${XDG_CONFIG_HOME:-$$HOME/.config}/snakemake
	@for profile in profiles/*; do \
	    ln -sfn $(CURDIR)/$$profile $${XDG_CONFIG_HOME:-$$HOME/.config}/snakemake/; done
	@echo "linked: $(notdir $(wildcard profiles/*)); use snakemake --profile gpu"

clean:
	rm -rf results logs benchmarks .snakemake
