/* The runtime of the CuTe DSL, for a GPU that is not there.

   Compiled functions of the DSL call it to load their kernels and to launch them. A launch goes to
   the function that `serve` was given; what nothing here answers, the DSL's linker reports. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID = 1, MOST_NAME = 4096 };
enum { STATIC = 1, SHARED = 97 }; /* attributes: bytes of shared memory, of a kernel and a program */

typedef struct {
  uint32_t grid[3], block[3];
  uint64_t shared;
  void *stream, *attributes;
  uint32_t count;
} Config;

typedef int (*Serve)(const char *name, const Config *config, void **parameters);
static Serve server;
static int most_shared;

void serve(Serve function, int shared) { server = function, most_shared = shared; }

/* The host code of the DSL can't be told of an error of its runtime: it would use what there isn't. */
static void refuse(const char *text, int number) {
  fprintf(stderr, "the virtual GPU %s %d, which the CuTe DSL asks its runtime for\n", text, number);
  abort();
}

static int new_library(void **library) { return (*library = malloc(1)) ? 0 : INVALID; }

static int new_kernel(void **kernel, const char *name) { /* lives as long as the process */
  if (strlen(name) >= MOST_NAME || !(*kernel = calloc(1, MOST_NAME))) return INVALID;
  strcpy(*kernel, name);
  return 0;
}

int _cuLibraryLoadData(void **library, const void *code, ...) { return new_library(library); }
int _cudaLibraryLoadData(void **library, const void *code, ...) { return new_library(library); }
int _cuLibraryGetKernel(void **k, void *library, const char *name) { return new_kernel(k, name); }
int _cudaLibraryGetKernel(void **k, void *library, const char *name) { return new_kernel(k, name); }
int _cuLibraryUnload(void *library) { return 0; }
int _cudaLibraryUnload(void *library) { return 0; }
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaSetDevice(int device) { return device ? INVALID : 0; }
int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }

static int answer(int *value, int is, int known, int attribute) {
  if (attribute != known) refuse("knows no attribute", attribute);
  *value = is;
  return 0;
}

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  return answer(value, most_shared, SHARED, attribute);
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  return answer(value, 0, STATIC, attribute); /* the kernels declare their memory at the launch */
}

int _cudaLaunchKernelEx(const Config *config, void *kernel, void **parameters) {
   return server ? server(kernel, config, parameters) : INVALID;
}

int cuda_dialect_init_library_once(void **slot, int (*load)(void **), int (*prepare)(void **, int),
                                   void *error) {
  void *library = 0;
  if (*slot) return 0;
  if (load(&library) || prepare && prepare(&library, 0)) return -1;
  *slot = library;
  return 0;
}

int cuda_dialect_unload_library_once(void **slot) { *slot = 0; return 0; }
const char *cuda_dialect_get_error_name(int error) { return "an error of the virtual GPU"; }
void cuda_dialect_print_on_error(int error) {}

void cuda_dialect_assert_success(int error) {
  if (error) refuse("has error", error);
}

void CuteDSLRT_TVMFFISetRaisedCudaError(void *a, void *b) { refuse("has error", INVALID); }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void *a, void *b) { refuse("has error", INVALID); }
