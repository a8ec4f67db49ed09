/* Memory shared with the service: memfds that cannot shrink, told to it with the first request that uses them. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

/* Whether the machine has so many bytes at all: to ask for more would take all there are before it fails. */
static bool imaginable(size_t bytes)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages <= 0 || page <= 0 || bytes / (size_t)page < (size_t)pages;
}

/* A sealed memfd of so many bytes, mapped; an errno where that cannot be had. */
static int make_memory(honed_buffer *buffer)
{
    int error;
    if (!imaginable(buffer->bytes))
        return ENOMEM;
    buffer->descriptor = memfd_create(buffer->name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (buffer->descriptor < 0)
        return errno;
    /* The pages now, so that running out of memory is an error and no SIGBUS. */
    error = posix_fallocate(buffer->descriptor, 0, (off_t)buffer->bytes);
    if (error)
        return error;
    if (fcntl(buffer->descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
        return errno;
    buffer->data = mmap(NULL, buffer->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->descriptor, 0);
    if (buffer->data == MAP_FAILED) {
        buffer->data = NULL;
        return errno;
    }
    return 0;
}

static void free_memory(honed_buffer *buffer)
{
    if (buffer->data)
        munmap(buffer->data, buffer->bytes);
    if (buffer->descriptor >= 0)
        close(buffer->descriptor);
    free(buffer);
}

static void take_told(struct call *call, const struct message *message, const struct value *result)
{
    honed_buffer *buffer = (honed_buffer *)call;
    if (result->kind != MAP)
        fail_nonsense(&call->failure, "no map");
    else
        buffer->known = buffer->service->connections;
    (void)message;
}

static void on_registered(struct call *call)
{
    honed_buffer *buffer = (honed_buffer *)call;
    requests_told(buffer);
    honed_buffer_free(buffer); /* what buffer_tell kept */
}

honed_code honed_buffer_new(honed_service *service, size_t bytes, honed_buffer **made)
{
    honed_buffer *buffer;
    int error;
    *made = NULL;
    succeed(&service->failure);
    if (!bytes)
        return fail(&service->failure, HONED_INVALID_ARGUMENT, "a buffer of %zu bytes is not possible", bytes);
    if (service->closed)
        return fail(&service->failure, HONED_INVALID_ARGUMENT, "the connection was freed");
    buffer = calloc(1, sizeof *buffer);
    if (!buffer)
        return fail_memory(&service->failure);
    buffer->references = 1;
    buffer->bytes = bytes;
    buffer->descriptor = -1;
    buffer->telling.take = take_told;
    buffer->telling.ended = on_registered;
    snprintf(buffer->name, sizeof buffer->name, "honed%lu", ++service->buffers);
    error = make_memory(buffer);
    if (error) {
        free_memory(buffer);
        return fail(&service->failure, HONED_NO_MEMORY, "there is no memory for a buffer of %zu bytes (%s); ask for less",
                    bytes, strerror(error));
    }
    buffer->service = service;
    service_keep(service);
    *made = buffer;
    return HONED_OK;
}

void buffer_keep(honed_buffer *buffer)
{
    buffer->references++;
}

void honed_buffer_free(honed_buffer *buffer)
{
    honed_service *service;
    if (!buffer || --buffer->references)
        return;
    service = buffer->service;
    if (buffer_known(buffer)) {
        struct frame *frame = frame_new(128);
        if (frame) {
            put_request(frame, ++service->msgids, "SystemSharedMemoryUnregister");
            put_map(frame, 1);
            put_text(frame, "name");
            put_text(frame, buffer->name);
        }
        send_unanswered(service, frame); /* which is answered, but nobody waits for it */
    }
    free_memory(buffer);
    service_drop(service);
}

bool buffer_known(const honed_buffer *buffer)
{
    return buffer->service->socket >= 0 && buffer->known == buffer->service->connections;
}

void buffer_tell(honed_buffer *buffer)
{
    honed_service *service = buffer->service;
    struct frame *frame;
    if (under_way(&buffer->telling))
        return;
    frame = frame_new(128);
    buffer->telling.msgid = ++service->msgids;
    buffer_keep(buffer);
    if (frame) {
        frame->descriptors = &buffer->descriptor;
        frame->descriptor_count = 1;
        put_request(frame, buffer->telling.msgid, "SystemSharedMemoryRegister");
        put_map(frame, 2);
        put_text(frame, "name");
        put_text(frame, buffer->name);
        put_text(frame, "byte_size");
        put_uint(frame, buffer->bytes);
    }
    if (frame && !frame->failed) {
        call_begin(service, &buffer->telling, frame, moment_after(service->timeout), false);
        return;
    }
    frame_free(frame);
    fail_memory(&buffer->telling.failure);
    on_registered(&buffer->telling);
}

void *honed_buffer_data(const honed_buffer *buffer)
{
    return buffer->data;
}

size_t honed_buffer_bytes(const honed_buffer *buffer)
{
    return buffer->bytes;
}
