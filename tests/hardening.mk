# SPDX-License-Identifier: Apache-2.0
# Searches for faults that are too slow for every build; docs/hardening.md says what each has found.
# make fuzz       SECONDS=60 of libFuzzer over all targets (clang)
# make san        the suite under TSan and valgrind, static analysis (clang, valgrind, cppcheck)   PARTS=tsan memory static
# make kills      KILLS=100 trainings killed at random moments and resumed

SECONDS ?= 60
KILLS   ?= 100
FUZZERS := $(patsubst tests/fuzz/%.c,$(BUILD)/%,$(wildcard tests/fuzz/fuzz_*.c))

NEED = for c in $1; do command -v $$c >/dev/null || { echo "make $@: wants $$c (Debian package $$c)" >&2; exit 2; }; done

.PHONY: fuzz fuzzers san kills
$(BUILD)/fuzz_%: $O/tests/fuzz/fuzz_%.o $(SHARE_O) $(HELP_O) $O/libtool.a $(BUILD)/libmoeblas.a tests/fuzz/entry.c
	@echo "  LD   $@"
	$Q$(CC) $(FLAGS) -Itests -fsanitize=fuzzer -DTARGET=fuzz_$* -o $@ tests/fuzz/entry.c $(filter %.o %.a,$^) $(BLAS) -lcjson $(LIBS) $(LDFLAGS)
fuzzers: $(FUZZERS)
# Guided by what of the library and the tool is reached, not by the oracle. clang warns of more than gcc.
$(if $(FUZZING),$O/src/% $O/tools/%): FLAGS += -fsanitize=fuzzer-no-link
fuzz: ; @$(call NEED,clang) && $(MAKE) --no-print-directory CC=clang CUDA=0 SAN=address,undefined BUILD=$(BUILD)-fuzz \
	CFLAGS='-Wno-pass-failed -Wno-missing-field-initializers' FUZZING=1 fuzzers && BUILD=$(BUILD)-fuzz tests/fuzz/fuzz.sh $(SECONDS)
san: ; @$(call NEED,clang valgrind cppcheck clang-tidy) && BUILD=$(BUILD) tests/san/san.sh $(PARTS)
kills: all ; @BUILD=$(BUILD) KILLS=$(KILLS) tests/test_io_failure.sh
-include $(wildcard $O/tests/fuzz/*.d)
