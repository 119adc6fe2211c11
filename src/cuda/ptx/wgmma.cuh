/* SPDX-License-Identifier: Apache-2.0
 *
 * wgmma: D[64,N] (+)= A[64,16] B[16,N], bf16 in shared memory, fp32 in registers. PTX ISA 8.0, section 9.7.15.
 * Every function is called by all 128 threads of a warpgroup. Thread t of it holds, of D, rows 16 (t/32) + (t%32)/4 + 8 i and
 * columns 8 j + 2 (t%4) + c, in d[4 j + 2 i + c], for i, c in {0,1}. */
#pragma once

#include <stdint.h>

#define N10_(t)  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define N0_9     "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define NAMES_64 N0_9 N10_(1) N10_(2) N10_(3) N10_(4) N10_(5) "%60,%61,%62,%63"
#define NAMES_96 \
  N0_9 N10_(1) N10_(2) N10_(3) N10_(4) N10_(5) N10_(6) N10_(7) N10_(8) "%90,%91,%92,%93,%94,%95"
#define NAMES_128                                                                       \
  N0_9 N10_(1) N10_(2) N10_(3) N10_(4) N10_(5) N10_(6) N10_(7) N10_(8) N10_(9) N10_(10) \
      N10_(11) "%120,%121,%122,%123,"                                                   \
               "%124,%125,%126,%127"
#define D4_(d, i)   "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3])
#define D8_(d, i)   D4_(d, i), D4_(d, (i) + 4)
#define D32_(d, i)  D8_(d, i), D8_(d, (i) + 8), D8_(d, (i) + 16), D8_(d, (i) + 24)
#define REGS_64(d)  D32_(d, 0), D32_(d, 32)
#define REGS_96(d)  D32_(d, 0), D32_(d, 32), D32_(d, 64)
#define REGS_128(d) D32_(d, 0), D32_(d, 32), D32_(d, 64), D32_(d, 96)

/* Orders register accesses with the wgmma that follow (9.7.15.7.1). */
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Closes the group of wgmma issued so far (9.7.15.7.2). */
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most PENDING groups are in flight (9.7.15.7.3). */
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Matrix descriptor (9.7.15.5.1) of a tile with 128-byte swizzle whose 1024-byte atoms are aligned. `group` is the
 * distance in bytes between 8-line groups, `block` that between 64-element blocks of the contiguous dimension when that
 * is M or N (unused when it is K). */
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t group, uint32_t block) {
  return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(block >> 4) << 16 | (uint64_t)(group >> 4) << 32 |
         (uint64_t)1 << 62;
}

/* A_MN, B_MN: 1 where the operand's contiguous dimension is M (N) rather than K. `add` false: D = A B. */
template <int N, int A_MN, int B_MN> struct wgmma;
#define WGMMA(N, REGISTERS, A, B, P, TA, TB)                                                      \
  template <int A_MN, int B_MN> struct wgmma<N, A_MN, B_MN> {                                     \
    static __device__ __forceinline__ void run(float *d, uint64_t a, uint64_t b, bool add) {      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                               \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES_##REGISTERS \
                   "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}"                         \
                   : REGS_##REGISTERS(d)                                                          \
                   : "l"(a), "l"(b), "r"((int)add), "n"(A_MN), "n"(B_MN));                        \
    }                                                                                             \
  };
WGMMA(128, 64, 64, 65, 66, 67, 68)
WGMMA(192, 96, 96, 97, 98, 99, 100)
WGMMA(256, 128, 128, 129, 130, 131, 132)
#undef WGMMA
