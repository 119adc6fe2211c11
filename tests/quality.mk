# SPDX-License-Identifier: Apache-2.0
# How good the tests and the build are, a part of the Makefile; docs/scoreboard.md shows what came out.
# make coverage   the suite with gcov's counters       make mutants    MUTANTS=300 changes of one token: who notices?
# make abi        programs of the last release run on  make scoreboard the table of what was measured, docs/scoreboard.md
# make reproducible  two builds in two folders, one hash
# make rounds     5 benches: how far do their medians spread?  BEFORE=the moeblas of the last release: what became slower?
MUTANTS ?= 300

.PHONY: coverage mutants abi reproducible scoreboard rounds
# Not install_test, whose programs are built without the counters. -O1: branches stay where they are written; no fortify:
# its branches are those of libc. Not judged by the tests: where they limit files, the counters cannot be written either.
coverage:
	@tools/deps.sh test
	@$(MAKE) --no-print-directory CUDA=0 BUILD=$(BUILD)-coverage CFLAGS='--coverage -O1 -U_FORTIFY_SOURCE' LDFLAGS=--coverage tests
	@find $(BUILD)-coverage -name '*.gcda' -delete
	@BUILD=$(BUILD)-coverage ONLY=test_ tests/run.sh unit scripts; BUILD=$(BUILD)-coverage tests/run.sh problems; \
	BUILD=$(BUILD)-coverage tools/gates/coverage.py --measure
mutants:
	@tools/deps.sh test
	@$(MAKE) --no-print-directory CUDA=0 BUILD=$(BUILD)-mutants tests
	@tools/mutants.py --build $(BUILD)-mutants --count $(MUTANTS)
abi: lib ; @BUILD=$(BUILD) tools/gates/abi.py
reproducible: ; @tools/reproducible.sh CUDA=0
scoreboard: ; @tools/scoreboard.py
rounds: all ; @tools/rounds.py $(BUILD)/moeblas $(if $(BEFORE),--before $(BEFORE)) -- @tests/problems/bench.txt
