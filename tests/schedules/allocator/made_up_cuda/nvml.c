// NVIDIA's management library without a GPU: torch asks it how devices are connected, and who else
// uses a device that is full.
#define NOT_SUPPORTED 3  // NVML_ERROR_NOT_SUPPORTED

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  *device = (void*)1;
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}
// The caller's zeros stay: no fabric.
int nvmlDeviceGetGpuFabricInfoV(void* device, void* info) { return 0; }
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* processes) {
  *count = 0;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
