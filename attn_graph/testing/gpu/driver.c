/* The part of CUDA's driver that Triton's launcher calls, for a GPU that is not there.

   A launch is checked as the driver's manual says, its parameters are copied, and that is all: the
   launcher's caller takes them, by take_launch, and executes the kernel. An error is a text, which
   cuGetErrorString gives. */
#include "cuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 512         /* parameters of a kernel */
#define MOST_BYTES 32764 /* of all parameters together */

typedef struct {
  int count;
  unsigned sizes[MOST];
  int shared; /* bytes of shared memory that launches may ask for */
} Function;

typedef struct {
  void *function;
  unsigned grid[3], block[3], shared, taken;
  unsigned char parameters[MOST_BYTES];
} Launch;

static struct { int shared, shared_per_multiprocessor, multiprocessors; } device;
static char problem[512] = "none";
static Launch launch;

static CUresult refuse(const char *text, long long is, long long limit) {
  snprintf(problem, sizeof problem, "%s: %lld, limit %lld", text, is, limit);
  return CUDA_ERROR_INVALID_VALUE;
}

void describe_device(int shared, int shared_per_multiprocessor, int multiprocessors) {
  device.shared = shared;
  device.shared_per_multiprocessor = shared_per_multiprocessor;
  device.multiprocessors = multiprocessors;
}

/* The sizes of a kernel's parameters, in bytes: kernelParams has none. */
int describe_function(void *function, int count, const unsigned *sizes) {
  Function *f = function;
  if (count > MOST) return 0;
  f->count = count;
  memcpy(f->sizes, sizes, count * sizeof *sizes);
  return 1;
}

/* The last launch, once. */
int take_launch(Launch *out) {
  *out = launch;
  launch.taken = 1;
  return !out->taken;
}

CUresult cuGetErrorString(CUresult code, const char **text) { *text = problem; return 0; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return 0; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuDeviceGet(CUdevice *d, int number) { *d = number; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice d) { *context = (CUcontext)1; return 0; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice d) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = device.shared; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = device.shared_per_multiprocessor; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = device.multiprocessors; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1; /* clocks and widths, which nothing follows from */
  }
  return 0;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return 0; }

CUresult cuModuleUnload(CUmodule module) { return 0; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return 0;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Function *f = calloc(1, sizeof *f); /* lives as long as the process, as Triton's kernels do */
  f->shared = 49152;
  *function = (CUfunction)f;
  return f ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute > CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE) /* of newer drivers */
    return refuse("number of a kernel's attribute", attribute, 15);
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return 0;
  if (value > device.shared) return refuse("bytes of shared memory", value, device.shared);
  ((Function *)function)->shared = value;
  return 0;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }

CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction function, const CUlaunchConfig *config) {
  return refuse("clusters of several programs", 2, 1);
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)out = pointer;
  return 0;
}

CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *attributes, void **out,
                                CUdeviceptr pointer) {
  return 0;
}

#define PADDED 16 /* in place of an element's bytes: 16 of 4 bits, and 8 bytes left free in copies */

static int item_bytes(CUtensorMapDataType type) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 0, PADDED};
  return (unsigned)type < sizeof bytes / sizeof *bytes ? bytes[type] : 0;
}

/* A tensor map: address, shape, strides, box, then rank, bytes of an element, swizzle, fill. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *shape, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  struct __attribute__((packed)) {
    cuuint64_t address, shape[5], strides[4];
    cuuint32_t box[5];
    unsigned char rank, item, swizzle, fill;
  } out = {.address = (cuuint64_t)address};
  int item = item_bytes(type), unit = item == PADDED ? 32 : 16;
  if ((size_t)map & 63) return refuse("bytes of a tensor map off a multiple of 64", (size_t)map & 63, 0);
  if (!item || interleave) return refuse("a tensor map of this type, or interleaved", type, 14);
  if ((size_t)address % unit) return refuse("bytes of a tensor off a multiple", (size_t)address % unit, unit);
  if (rank < 1 || rank > 5) return refuse("axes of a tensor map", rank, 5);
  if (swizzle > CU_TENSOR_MAP_SWIZZLE_128B) return refuse("mode of swizzling", swizzle, 3);
  for (unsigned n = 0; n < rank; n++) {
    if (!shape[n] || shape[n] > 1ull << 32) return refuse("size of a tensor", shape[n], 1ull << 32);
    if (!box[n] || box[n] > 256) return refuse("size of a box", box[n], 256);
    if (steps[n] != 1) return refuse("step between elements", steps[n], 1);
    out.shape[n] = shape[n], out.box[n] = box[n];
  }
  for (unsigned n = 0; n + 1 < rank; n++) {
    if (strides[n] % unit) return refuse("bytes of a stride off a multiple", strides[n] % unit, unit);
    if (strides[n] >= 1ull << 40) return refuse("bytes of a stride", strides[n], 1ull << 40);
    out.strides[n] = strides[n];
  }
  if (item == PADDED) {
    if (shape[0] % 128) return refuse("elements of 4 bits off a multiple of 128", shape[0] % 128, 0);
    if (box[0] != 128) return refuse("elements of 4 bits of a box's row", box[0], 128);
    if (swizzle % 3) return refuse("mode of swizzling of elements of 4 bits", swizzle, 3);
  }
  long long row = (long long)box[0] * (item == PADDED ? 1 : item), span = swizzle ? 16 << swizzle : 1 << 30;
  if (row & 15) return refuse("bytes of a box's row off a multiple of 16", row & 15, 0);
  if (row > span) return refuse("bytes of a box's row, more than are swizzled", row, span);
  out.rank = rank, out.item = item, out.swizzle = swizzle, out.fill = fill;
  memset(map, 0, sizeof *map);
  memcpy(map, &out, sizeof out);
  return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  Function *f = (Function *)function;
  unsigned at = 0;
  if (config->gridDimX > 2147483647u) return refuse("programs along x", config->gridDimX, 2147483647);
  if (config->gridDimY > 65535) return refuse("programs along y", config->gridDimY, 65535);
  if (config->gridDimZ > 65535) return refuse("programs along z", config->gridDimZ, 65535);
  if (config->blockDimX > 1024) return refuse("threads of a program", config->blockDimX, 1024);
  if (config->sharedMemBytes > (unsigned)f->shared)
    return refuse("bytes of shared memory", config->sharedMemBytes, f->shared);
  for (unsigned n = 0; n < config->numAttrs; n++) /* that it may begin early: here it does not */
    if (config->attrs[n].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      return refuse("number of a launch's attribute", config->attrs[n].id, 6);
  for (int n = 0; n < f->count; at += f->sizes[n++]) {
    if (at + f->sizes[n] > MOST_BYTES) return refuse("bytes of parameters", at, MOST_BYTES);
    memcpy(launch.parameters + at, parameters[n], f->sizes[n]);
  }
  launch.function = function;
  launch.grid[0] = config->gridDimX, launch.grid[1] = config->gridDimY;
  launch.grid[2] = config->gridDimZ, launch.block[0] = config->blockDimX;
  launch.block[1] = config->blockDimY, launch.block[2] = config->blockDimZ;
  launch.shared = config->sharedMemBytes;
  launch.taken = 0;
  return 0;
}
