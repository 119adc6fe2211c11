# SPDX-License-Identifier: Apache-2.0
# What wants a GPU, a part of the Makefile; kernels and pictures read what a CUDA build and the GPU left behind.
# make gpu        gpu-check and gpu-bench, on a GPU    make gpu-python    the Python tests with the machine's own python3
# make gpu-peers  times what others have written       make kernels       writes docs/kernels.md from a CUDA build
# make pictures   draws the tables of bench/results    TARGETS=file.csv   lets gpu-bench say where it loses
# make gpu-soak   the parts of tests/soak on a GPU, SECONDS=60 each   PART=replays threads beside memory faults random
TABLE := bench/results/h200.csv
SOAK  := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/soak/*.c))

.PHONY: gpu gpu-check gpu-bench gpu-peers gpu-python gpu-soak soak kernels pictures
gpu: gpu-check ; @$(MAKE) --no-print-directory gpu-bench
gpu-check: tests ; @BUILD=$(BUILD) tests/cuda/gpu_check.sh
gpu-python: all ; @BUILD=$(BUILD) python3 -m pytest -q -p no:cacheprovider tests/python --ignore tests/python/test_wheel.py
gpu-bench: all
	@mkdir -p bench/results
	@$(BUILD)/moeblas bench --backend cuda --csv $(if $(TARGETS),--targets $(TARGETS)) @tests/problems/bench_cuda.txt \
	  >$(BUILD)/h200.csv && mv $(BUILD)/h200.csv $(TABLE)
gpu-peers:
	@mkdir -p $(BUILD) bench/results
	@python3 bench/peers/run.py --csv $(BUILD)/h200_peers.csv --seconds 1 @tests/problems/bench_cuda.txt && \
	  mv $(BUILD)/h200_peers.csv bench/results/
kernels: tests ; @BUILD=$(BUILD) tools/gates/kernels.py --write
pictures: ; @python3 bench/plot.py $(TABLE) $(wildcard bench/results/h200_peers.csv)
# The other user of the GPU is a library, because a program has no room for a second static CUDA runtime beside the hidden one.
OTHER := $(BUILD)/tests/soak/libother.so
$(OTHER): tests/soak/device.cu tests/soak/device.h
	@mkdir -p $(@D); echo "  NVCC $<"
	$Q$(NVCC) -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC,-fno-exceptions,-fno-rtti,-Wall,-Wextra \
	  -Xlinker --as-needed,-soname,$(@F),--exclude-libs,ALL,-z,relro,-z,now -o $@ $<
$(SOAK): $(OTHER)
$(SOAK): private LIBS += -Wl,-rpath,'$$ORIGIN'
soak: all $(if $(CUDA_O),$(SOAK)) ; $(if $(CUDA_O),@:,@echo "make $@: wants nvcc, there is none or CUDA=0" >&2; exit 2)
gpu-soak: soak ; @BUILD=$(BUILD) tests/soak/soak.sh $(SECONDS) $(PART)
tests: $(SOAK:$(BUILD)/%=$O/%.o)
-include $(SOAK:$(BUILD)/%=$O/%.d)
