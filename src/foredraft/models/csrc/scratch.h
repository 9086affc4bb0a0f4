/* Working memory for kernels. */
#ifndef FOREDRAFT_SCRATCH_H
#define FOREDRAFT_SCRATCH_H

#include <stdlib.h>
#include <string.h>

/* A thread's scratch, one in each file that includes this; grown as needed and kept. Padding that is computed with,
 * though nobody reads the result, starts as zeros: numbers of any old bits can be slow ones. */
static inline void *scratch(size_t bytes) {
    static _Thread_local void *buffer;
    static _Thread_local size_t capacity;
    if (capacity < bytes) {
        free(buffer);
        capacity = (bytes + bytes / 2 + 63) / 64 * 64;
        buffer = aligned_alloc(64, capacity);
        memset(buffer, 0, capacity);
    }
    return buffer;
}

#endif
