/* CUDA's driver as far as Shoal calls it, with memory files for a device's memory, against the types of NVIDIA's own
   header: so what Shoal passes is read as the driver would read it. Two devices that reach each other. */
#define _GNU_SOURCE
#include <cuda.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define STEP ((size_t)2 << 20)
#define MOST 64

static struct { int used, fd, device; size_t size; } handles[MOST];
static struct { void *at; size_t size; int mapped; } ranges[MOST];
static char failing[64];
static CUresult with;

void stub_fail(const char *name, int code) { strncpy(failing, name, sizeof failing - 1); with = code; }

/* handles, reserved ranges, mapped ranges */
void stub_counts(int *out) {
    out[0] = out[1] = out[2] = 0;
    for (int i = 0; i < MOST; i++) {
        out[0] += handles[i].used;
        out[1] += ranges[i].at != NULL;
        out[2] += ranges[i].mapped;
    }
}

#define MAY_FAIL if (!strcmp(failing, __func__)) return with

static CUresult new_handle(CUmemGenericAllocationHandle *handle, int fd, int device, size_t size) {
    for (int i = 1; i < MOST; i++)
        if (!handles[i].used) {
            handles[i].used = 1, handles[i].fd = fd, handles[i].device = device, handles[i].size = size;
            *handle = 0x100000000ull + i; /* more than 32 bits */
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static int right(const CUmemAllocationProp *p) {
    static const CUmemAllocationProp none;
    return p->type == CU_MEM_ALLOCATION_TYPE_PINNED && p->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           p->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && p->location.id >= 0 &&
           p->location.id < 2 && !p->win32HandleMetaData && !memcmp(&p->allocFlags, &none.allocFlags, sizeof p->allocFlags);
}

CUresult CUDAAPI cuInit(unsigned int flags) { MAY_FAIL; return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult CUDAAPI cuDeviceGetCount(int *count) { MAY_FAIL; *count = 2; return CUDA_SUCCESS; }

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    MAY_FAIL;
    if (device < 0 || device > 1) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
             attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice one, CUdevice other) {
    MAY_FAIL;
    *can = one != other;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult code, const char **text) {
    *text = code == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported" : NULL;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *step, const CUmemAllocationProp *p,
                                               CUmemAllocationGranularity_flags option) {
    MAY_FAIL;
    if (!right(p) || option != CU_MEM_ALLOC_GRANULARITY_MINIMUM) return CUDA_ERROR_INVALID_VALUE;
    *step = STEP;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p,
                             unsigned long long flags) {
    MAY_FAIL;
    if (!right(p) || size % STEP || !size || flags) return CUDA_ERROR_INVALID_VALUE;
    int fd = memfd_create("device", MFD_CLOEXEC);
    if (ftruncate(fd, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    return new_handle(handle, fd, p->location.id, size);
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    int i = (int)(handle - 0x100000000ull);
    if (i < 1 || i >= MOST || !handles[i].used) return CUDA_ERROR_INVALID_VALUE;
    close(handles[i].fd);
    handles[i].used = 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
    MAY_FAIL;
    int i = (int)(handle - 0x100000000ull);
    if (i < 1 || i >= MOST || !handles[i].used || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)out = dup(handles[i].fd);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from,
                                                CUmemAllocationHandleType type) {
    MAY_FAIL;
    struct stat about;
    int fd = (int)(size_t)from;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(fd, &about) || !about.st_size)
        return CUDA_ERROR_INVALID_VALUE;
    return new_handle(handle, dup(fd), 1, about.st_size);
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *p, CUmemGenericAllocationHandle handle) {
    MAY_FAIL;
    int i = (int)(handle - 0x100000000ull);
    if (i < 1 || i >= MOST || !handles[i].used) return CUDA_ERROR_INVALID_VALUE;
    memset(p, 0, sizeof *p);
    p->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p->location.id = handles[i].device;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr wish,
                                     unsigned long long flags) {
    MAY_FAIL;
    if (size % STEP || !size || alignment || wish || flags) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (!ranges[i].at) {
            void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
            ranges[i].at = found, ranges[i].size = size, ranges[i].mapped = 0;
            *at = (CUdeviceptr)found;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static int range_of(CUdeviceptr at, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (ranges[i].at && ranges[i].at == (void *)at && ranges[i].size == size) return i;
    return -1;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr at, size_t size) {
    int i = range_of(at, size);
    if (i < 0 || ranges[i].mapped) return CUDA_ERROR_INVALID_VALUE;
    munmap(ranges[i].at, size);
    ranges[i].at = NULL;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    MAY_FAIL;
    int i = range_of(at, size), h = (int)(handle - 0x100000000ull);
    if (i < 0 || ranges[i].mapped || offset || flags || h < 1 || h >= MOST || !handles[h].used ||
        size > handles[h].size)
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[h].fd, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    ranges[i].mapped = 1;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr at, size_t size) {
    int i = range_of(at, size);
    if (i < 0 || !ranges[i].mapped) return CUDA_ERROR_INVALID_VALUE;
    mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    ranges[i].mapped = 0;
    return CUDA_SUCCESS;
}

/* The memory is there once all that may use it have been named: its own device and the other. */
CUresult CUDAAPI cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *desc, size_t count) {
    MAY_FAIL;
    int i = range_of(at, size), seen = 0;
    if (i < 0 || !ranges[i].mapped) return CUDA_ERROR_INVALID_VALUE;
    for (size_t k = 0; k < count; k++) {
        if (desc[k].location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc[k].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_VALUE;
        seen |= 1 << desc[k].location.id;
    }
    if (seen != 3) return CUDA_ERROR_INVALID_DEVICE;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
