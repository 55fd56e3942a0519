# SPDX-License-Identifier: Apache-2.0
# make run | test | plan | lint | tables | profiles | clean;  CONFIG=my.yaml and PROFILE=gpu change run and plan.

PROFILE ?= cpu
CONFIG ?=
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
SNAKEMAKE := snakemake --profile profiles/$(PROFILE) $(if $(CONFIG),--configfile $(CONFIG))
ENVIRONMENT := $(if $(filter cpu,$(PROFILE)),cpu,gpu)

.PHONY: run test plan lint tables setup profiles clean

run: setup
	$(SNAKEMAKE)

plan: setup
	$(SNAKEMAKE) --dry-run

test: setup
	pytest

lint: setup
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile rules

tables: setup
	PYTHONPATH=scripts:tests python docs/make_tables.py

setup:
	@bash envs/setup.sh $(ENVIRONMENT)

profiles:
	@mkdir -p $${XDG_CONFIG_HOME:-$$HOME/.config}/snakemake
	@for profile in profiles/*; do \
	    ln -sfn $(CURDIR)/$$profile $${XDG_CONFIG_HOME:-$$HOME/.config}/snakemake/; done
	@echo "linked: $(notdir $(wildcard profiles/*)); use snakemake --profile gpu"

clean:
	rm -rf results logs benchmarks .snakemake
