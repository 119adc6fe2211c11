# SPDX-License-Identifier: Apache-2.0
# The only build of moeblas. Files are found by wildcard, so that a new one needs no edit here.
# make            library and command line tool        make lib      the library alone, which needs nothing but gcc
# make train      builds, trains, writes run/          make test     builds and runs every test and gate
# make check      proves tests/problems/ci.txt         make bench    times tests/problems/bench.txt
# make gates      format, sizes, symbols, ...          make deps     installs missing Debian packages
# make install    into PREFIX=/usr/local, DESTDIR=     make clean    removes build and build-san
# Variables: BUILD=build  CC=gcc  CFLAGS=  LDFLAGS=  SAN=address,undefined  ONLY=part of a test's name  V=1  NVCC=nvcc
#            CUDA=0 (builds without it even if there is an nvcc)

SAN    ?=
BUILD  ?= $(if $(SAN),build-san,build)
CC     = gcc
PREFIX ?= /usr/local
NVCC   := $(or $(NVCC),$(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc)))
CUDA   ?= $(if $(NVCC),1,0)
MAKEFLAGS += -r $(if $(filter 0,$(MAKELEVEL)),-j$(shell nproc))

VERSION := $(shell sed -nE 's/^\#define MOE_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$$/\2/p' include/moeblas.h | paste -sd.)
SONAME  := libmoeblas.so.$(firstword $(subst ., ,$(VERSION)))
ARCH    := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null)))
BLAS    := $(firstword $(wildcard /usr/lib/*/openblas-serial/libopenblas.a))
BLAS_INCLUDE := $(patsubst /usr/lib/%/libopenblas.a,/usr/include/%,$(BLAS))
Q       := $(if $(V),,@)

SANITIZE = $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer)
HARDEN = $(if $(SAN)$(findstring -O0,$(CFLAGS)),,-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3 -fstack-protector-strong -fstack-clash-protection \
         -fno-strict-overflow -fno-delete-null-pointer-checks)
override LDFLAGS += -Wl,-z,relro,-z,now,-z,noexecstack
# No contraction outside the matrix kernels: what a formula says is what is computed, on every machine.
FLAGS = -std=c11 -D_GNU_SOURCE -O2 -g -fPIC -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math \
        -Wall -Wextra -Wpedantic -Werror -MMD -MP -Iinclude -ffile-prefix-map=$(CURDIR)=. $(SANITIZE) $(HARDEN)
FLAGS_avx2   = -mavx2 -mfma
FLAGS_avx512 = $(FLAGS_avx2) -mavx512f -mavx512vl -mavx512dq -mavx512bw

# The tile kernel is compiled once an instruction set; the CPU chooses at run time.
O       := $(BUILD)/obj
KERNELS := $(if $(wildcard src/cpu/kernel.c),base $(if $(filter x86_64,$(ARCH)),avx2 avx512))
LIB_O   := $(patsubst %.c,$O/%.o,$(filter-out src/cpu/kernel.c,$(wildcard src/*.c src/cpu/*.c))) \
           $(KERNELS:%=$O/src/cpu/kernel_%.o)
# The CUDA back end with its runtime is one object in which all names but moe_* are local: users link nothing more.
ifneq ($(CUDA),0)
$(if $(NVCC),,$(error CUDA=$(CUDA): there is no nvcc in PATH or /usr/local/cuda/bin; leave CUDA out or say NVCC=...))
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
CUDART  := $(firstword $(wildcard $(CUDA_HOME)/lib64/libcudart_static.a $(CUDA_HOME)/lib/libcudart_static.a))
CUDA_O  := $(patsubst %,$O/%.o,$(wildcard src/cuda/*.c src/cuda/*/*.c src/cuda/*.cu src/cuda/*/*.cu))
CUDA_T  := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/cuda/*.c))
LIB_O   += $O/cuda.o
endif
LIBS     = -lm $(if $(CUDA_O),-lrt -ldl -lpthread)
SHARE_O := $(patsubst %.c,$O/%.o,$(wildcard tests/oracle*.c))
TOOL_O  := $(patsubst %.c,$O/%.o,$(wildcard tools/*.c tools/train/*.c)) $(SHARE_O)
TESTS   := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/test_*.c))
HELP_O  := $(patsubst %.c,$O/%.o,$(wildcard tests/support*.c))

.PHONY: all lib tests train test check bench gates install clean help deps
.DELETE_ON_ERROR .SECONDARY:
all: lib $(BUILD)/moeblas $(BUILD)/libmoeblas_xla.so
lib: $(BUILD)/libmoeblas.a $(BUILD)/libmoeblas.so
tests: all $(TESTS) $(CUDA_T)

$O/src/context.o: FLAGS += $(if $(CUDA_O),-DMOE_CUDA)
$O/src/cpu/%.o $O/tools/train/%.o: FLAGS += -O3
$O/src/cpu/kernel_%.o: FLAGS += -ffp-contract=fast $(FLAGS_$*) -DMOE_KERNEL=$*
$O/tests/%.o: FLAGS += -Isrc -Itests
$O/tools/%.o: FLAGS += -Itools -Itests
$O/tools/bench%: FLAGS += $(if $(BLAS),-DMOE_HAVE_OPENBLAS -isystem $(BLAS_INCLUDE))
$O/%.o: %.c Makefile
	@mkdir -p $(@D); echo "  CC   $<"
	$Q$(CC) $(FLAGS) $(CFLAGS) -c $< -o $@
$(KERNELS:%=$O/src/cpu/kernel_%.o): $O/src/cpu/kernel_%.o: src/cpu/kernel.c Makefile
	@mkdir -p $(@D); echo "  CC   $< ($*)"
	$Q$(CC) $(FLAGS) $(CFLAGS) -c $< -o $@
# No contraction here either, but for the tensor cores' epilogues. A kernel with a spill or a stack frame does not build.
$O/src/cuda/%: FMAD = $(if $(findstring gemm/,$@),-ftz=true,-fmad=false)
$O/%.cu.o: %.cu Makefile tools/gates/ptxas.sh
	@mkdir -p $(@D); echo "  NVCC $<"
	$Q$(NVCC) -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a $(FMAD) -Iinclude -MMD -MP -MF $(@:.o=.d) -Xptxas -v \
	  -Xcompiler -fPIC,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,-Wextra -c $< -o $@ >$(@:.o=.ptxas) 2>&1 || { cat $(@:.o=.ptxas); exit 1; }
	$Qtools/gates/ptxas.sh $(@:.o=.ptxas) || { rm $@; exit 1; }
$O/%.c.o: %.c Makefile
	@mkdir -p $(@D); echo "  CC   $<"
	$Q$(CC) $(FLAGS) $(CFLAGS) -isystem $(CUDA_HOME)/include -c $< -o $@
$O/cuda.o: $(CUDA_O)
	@echo "  LD   $@"
	$Qld -r -o $@ $^ $(CUDART) && objcopy -w --keep-global-symbol='moe_*' $@
$(filter $O/tools/%,$(TOOL_O)): | $(BUILD)/cjson
$(BUILD)/cjson: # turns a missing header into a sentence
	@mkdir -p $(@D); echo '#include <cjson/cJSON.h>' | $(CC) -E - >$@ 2>&1 || { echo \
	"moeblas: the command line tool needs cJSON (Debian: libcjson-dev); 'make lib' builds the library without it" >&2; exit 1; }

$(BUILD)/libmoeblas.a: $(LIB_O)
$O/libtool.a: $(filter-out $O/tools/main.o,$(filter $O/tools/%,$(TOOL_O)))
$(BUILD)/libmoeblas.a $O/libtool.a:
	@echo "  AR   $@"; rm -f $@
	$Q$(AR) rcs $@ $^
# Exported are exactly the functions that the public headers declare.
$(BUILD)/moeblas.map: $(wildcard include/*.h) Makefile
	@mkdir -p $(@D); (echo 'MOEBLAS_0 { global:'; sed -nE 's/^[a-z][a-z0-9_ ]*[ *](moe_[a-z0-9_]+)\(.*/\1;/p' $(filter %.h,$^); \
	echo 'local: *; };') >$@
LINK = $(CC) -shared -fopenmp $(SANITIZE) -Wl,-soname,$(SONAME),--version-script=$(BUILD)/moeblas.map $(if $(SAN),,-Wl,--no-undefined)
$(BUILD)/$(SONAME): $(LIB_O) $(BUILD)/moeblas.map
	@echo "  LD   $@"
	$Q$(LINK) -o $@ $(LIB_O) $(LIBS) $(LDFLAGS)
$(BUILD)/libmoeblas.so: $(BUILD)/$(SONAME)
	@ln -sf $(SONAME) $@
$(BUILD)/moeblas: $(TOOL_O) $(BUILD)/libmoeblas.a
	@echo "  LD   $@"
	$Q$(CC) -fopenmp $(SANITIZE) -o $@ $^ $(BLAS) -lcjson $(LIBS) $(LDFLAGS)
# A test that defines __wrap_f stands in front of f.
$(BUILD)/tests/%: $O/tests/%.o $(SHARE_O) $(HELP_O) $O/libtool.a $(BUILD)/libmoeblas.a
	@mkdir -p $(@D); echo "  LD   $@"
	$Q$(CC) -fopenmp $(SANITIZE) -o $@ $^ -lcjson $(LIBS) $(LDFLAGS) $$(sed -nE 's/.*__wrap_([a-z_]+)\(.*/-Wl,--wrap=\1/p' tests/$*.c)

train: ; @tools/deps.sh train && $(MAKE) --no-print-directory all && $(BUILD)/moeblas train --out run
test:  ; @tools/deps.sh test && $(MAKE) --no-print-directory tests $(if $(SAN),,wheel) && BUILD=$(BUILD) ONLY='$(ONLY)' tests/run.sh $(PARTS)
gates: lib ; @BUILD=$(BUILD) ONLY='$(ONLY)' tests/run.sh gates
check: all ; @$(BUILD)/moeblas check @tests/problems/ci.txt
bench: all ; @$(BUILD)/moeblas bench @tests/problems/bench.txt
deps:  ; @tools/deps.sh test
install: all ; @BUILD=$(BUILD) PREFIX='$(PREFIX)' VERSION=$(VERSION) tools/install.sh
clean: ; @rm -rf build build-san
help:  ; @sed -nE 's/^# ((make|Variables:|  ) .*)/\1/p' $(MAKEFILE_LIST:%.d=)
include python/python.mk tests/cuda/gpu.mk $(wildcard tests/*.mk)
-include $(wildcard $(patsubst %.o,%.d,$(LIB_O) $(TOOL_O) $(HELP_O) $(CUDA_O) $(TESTS:$(BUILD)/%=$O/%.o) $(CUDA_T:$(BUILD)/%=$O/%.o)))
