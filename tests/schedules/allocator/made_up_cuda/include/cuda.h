// So much of CUDA's driver header as torch's own headers of its allocator mention.
#pragma once
#define CUDA_VERSION 13000
