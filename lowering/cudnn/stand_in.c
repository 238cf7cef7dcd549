/* Stands in for libcuda.so.1 where there is none: enough for cuDNN to plan for a device that it
   is told of. No call does anything; counting devices finds none. */
#define NO_DEVICE 34 /* CUDA_ERROR_STUB_LIBRARY */
int cuDeviceGetCount(int *count) { *count = 0; return 0; }
#define ABSENT(name) int name(void) { return NO_DEVICE; }
ABSENT(cuInit) ABSENT(cuDriverGetVersion) ABSENT(cuGetErrorString) ABSENT(cuGetErrorName)
ABSENT(cuModuleGetFunction) ABSENT(cuModuleLoadData) ABSENT(cuModuleUnload)
ABSENT(cuTensorMapEncodeIm2col) ABSENT(cuTensorMapEncodeTiled)
ABSENT(cuCtxGetCurrent) ABSENT(cuCtxGetLimit) ABSENT(cuCtxPopCurrent) ABSENT(cuCtxPushCurrent)
ABSENT(cuStreamGetCtx)
ABSENT(cuLinkCreate) ABSENT(cuLinkAddData) ABSENT(cuLinkComplete) ABSENT(cuLinkDestroy)
ABSENT(cuLaunchKernel) ABSENT(cuLaunchCooperativeKernel) ABSENT(cuLaunchKernelEx)
ABSENT(cuDeviceGet)
ABSENT(cuLibraryLoadData) ABSENT(cuLibraryLoadFromFile) ABSENT(cuLibraryGetKernel)
ABSENT(cuLibraryUnload)
ABSENT(cuKernelSetAttribute) ABSENT(cuKernelGetAttribute) ABSENT(cuKernelGetFunction)
ABSENT(cuOccupancyMaxPotentialClusterSize)
