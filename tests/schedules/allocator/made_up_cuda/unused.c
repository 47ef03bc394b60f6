// What torch's library wants to find in a CUDA runtime, and a trace of one stream has no use for.
// Their parameters do not matter, so they are declared without.
#include <stdio.h>

#define NOT_SUPPORTED 801  // cudaErrorNotSupported

// Done as soon as they are called.
#define DONE(name) int name(void) { return 0; }
DONE(cudaDeviceEnablePeerAccess)
DONE(cudaDeviceSynchronize)
DONE(cudaEventCreateWithFlags)
DONE(cudaEventDestroy)
DONE(cudaEventElapsedTime)
DONE(cudaEventQuery)
DONE(cudaEventRecord)
DONE(cudaEventSynchronize)
DONE(cudaStreamCreateWithPriority)
DONE(cudaStreamQuery)
DONE(cudaStreamSynchronize)
DONE(cudaStreamWaitEvent)
DONE(cudaThreadExchangeStreamCaptureMode)

// Said and refused, so that a release of torch that comes to need one is noticed.
#define REFUSED(name) int name(void) { return refused(#name); }
static int refused(const char* name) {
  fprintf(stderr, "the made-up runtime has no %s\n", name);
  return NOT_SUPPORTED;
}
REFUSED(cudaDeviceCanAccessPeer)
REFUSED(cudaDeviceGetDefaultMemPool)
REFUSED(cudaDeviceGetGraphMemAttribute)
REFUSED(cudaDeviceSetGraphMemAttribute)
REFUSED(cudaFreeAsync)
REFUSED(cudaGraphNodeGetDependencies)
REFUSED(cudaIpcCloseMemHandle)
REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaMallocAsync)
REFUSED(cudaMemPoolGetAttribute)
REFUSED(cudaMemPoolSetAccess)
REFUSED(cudaMemPoolSetAttribute)
REFUSED(cudaMemPoolTrimTo)
REFUSED(cudaMemcpy)
REFUSED(cudaMemcpyAsync)
REFUSED(cudaMemcpyPeerAsync)
REFUSED(cudaStreamGetCaptureInfo)
