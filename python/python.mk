# SPDX-License-Identifier: Apache-2.0
# The Python package, a part of the Makefile: XLA's handlers, the wheel, the environment of the tests.
# make wheel      the Python package, in build/dist    make test-python   its tests, with torch, jax and transformers
PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)
export PYTHON

$O/python/native/%.o: FLAGS += -fvisibility=hidden
$(BUILD)/libmoeblas_xla.so: $(patsubst %.c,$O/%.o,$(wildcard python/native/*.c)) $(BUILD)/$(SONAME)
	@echo "  LD   $@"
	$Q$(CC) -shared $(SANITIZE) $(if $(SAN),,-Wl,--no-undefined) -Wl,-rpath,'$$ORIGIN' -o $@ $(filter %.o,$^) \
	  -L$(BUILD) -l:$(SONAME) -lpthread $(LDFLAGS)
# In the wheel libgomp lies beside the library; a system's own comes first where it is loaded already.
$(BUILD)/wheel/libmoeblas.so: $(LIB_O) $(BUILD)/moeblas.map
	@mkdir -p $(@D); echo "  LD   $@"
	$Q$(LINK) -Wl,-rpath,'$$ORIGIN' -o $@ $(LIB_O) $(LIBS) $(LDFLAGS)

.PHONY: wheel test-python
wheel: $(BUILD)/wheel/libmoeblas.so $(BUILD)/libmoeblas_xla.so ; @tools/deps.sh wheel && BUILD=$(BUILD) CC='$(CC)' python/wheel.sh
test-python: all ; @tools/deps.sh test && tools/venv.sh $(BUILD) all && $(MAKE) --no-print-directory wheel && \
  BUILD=$(BUILD) ONLY='$(ONLY)' tests/run.sh python
-include $(wildcard $(patsubst %.c,$O/%.d,$(wildcard python/native/*.c)))
