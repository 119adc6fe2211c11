# SPDX-License-Identifier: Apache-2.0
# The host side of the CUDA back end on a runtime that computes nothing, a part of the Makefile: build/tests/mock_cuda.
MOCK := $(if $(CUDA_O),$(BUILD)/tests/mock_cuda)
MOCK_O := $(patsubst %,$O/%.o,$(wildcard tests/mock_cuda/*.c))
tests: $(MOCK)
$(MOCK): $(MOCK_O) $(CUDA_O) $(filter-out $O/cuda.o,$(LIB_O)) $(SHARE_O) $O/libtool.a
	@mkdir -p $(@D); echo "  LD   $@"
	$Q$(CC) -fopenmp $(SANITIZE) -o $@ $^ $(BLAS) -lcjson -lm -ldl -lpthread $(LDFLAGS) -Wl,--wrap=moe_host_alloc
-include $(MOCK_O:.o=.d)
