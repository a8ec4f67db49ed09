/* Requests: what they bring, and what is known of the last call. */
#include <stdlib.h>
#include <string.h>

#include "request.h"

/* ---- Making and freeing ---- */

honed_request *honed_request_new(honed_service *service, const char *model)
{
    honed_request *request = calloc(1, sizeof *request);
    if (!request || !(request->model = strdup(model))) {
        free(request);
        return NULL;
    }
    request->call.take = take_answer;
    request->call.ended = request_ended;
    request->call.refused = take_refusal;
    request->service = service;
    request->timeout = -1;
    service_keep(service);
    return request;
}

static void free_binding(struct binding *binding)
{
    free(binding->name);
    free(binding->shape);
    honed_buffer_free(binding->buffer);
    *binding = (struct binding){0};
}

static void free_bindings(struct bindings *bindings)
{
    for (size_t i = 0; i < bindings->count; i++)
        free_binding(&bindings->of[i]);
    free(bindings->of);
    *bindings = (struct bindings){0};
}

void forget_done(honed_service *service, honed_request *request)
{
    honed_request *before = NULL, *at = service->done_first;
    while (at && at != request) {
        before = at;
        at = at->next_done;
    }
    if (!at)
        return;
    if (before)
        before->next_done = at->next_done;
    else
        service->done_first = at->next_done;
    if (service->done_last == at)
        service->done_last = before;
}

void honed_request_free(honed_request *request)
{
    honed_service *service;
    if (!request)
        return;
    service = request->service;
    honed_request_cancel(request);
    forget_form(request);
    forget_done(service, request);
    free_bindings(&request->inputs);
    free_bindings(&request->wanted);
    tensors_free(&request->outputs);
    free(request->data);
    free(request->model);
    free(request);
    set_timer(service);
    service_drop(service);
}

/* ---- What it brings ---- */

honed_code not_now(honed_request *request)
{
    if (!under_way(&request->call))
        return HONED_OK;
    return fail(&request->failure, HONED_INVALID_ARGUMENT,
                "the request is on its way; change it, and make it again, after honed_collect");
}

/* The place of that name, or a new one behind the others, emptied; NULL where memory is short. */
static struct binding *place(struct bindings *bindings, const char *name)
{
    struct binding *of, *found;
    char *copied = strdup(name);
    size_t at = 0;
    if (!copied)
        return NULL;
    while (at < bindings->count && strcmp(bindings->of[at].name, name))
        at++;
    if (at == bindings->count) {
        of = realloc(bindings->of, (at + 1) * sizeof *of);
        if (!of) {
            free(copied);
            return NULL;
        }
        bindings->of = of;
        bindings->of[at] = (struct binding){0};
        bindings->count++;
    }
    found = &bindings->of[at];
    free_binding(found);
    found->name = copied;
    return found;
}

static honed_code check_range(honed_request *request, const char *name, const honed_buffer *buffer, size_t offset,
                              size_t bytes)
{
    if (buffer->service != request->service)
        return fail(&request->failure, HONED_INVALID_ARGUMENT, "the buffer for %s was made with another connection", name);
    if (offset > buffer->bytes || bytes > buffer->bytes - offset)
        return fail(&request->failure, HONED_INVALID_ARGUMENT,
                    "%s has %zu bytes, which a buffer of %zu does not have at %zu; make it larger", name, bytes,
                    buffer->bytes, offset);
    return HONED_OK;
}

static honed_code set_input(honed_request *request, const char *name, honed_type type, const int64_t *shape, size_t rank,
                            const void *data, honed_buffer *buffer, size_t offset)
{
    int64_t bytes = count_bytes(type, shape, rank);
    struct binding *binding;
    int64_t *copied;
    succeed(&request->failure);
    if (not_now(request))
        return request->failure.code;
    if (bytes < 0)
        return fail(&request->failure, HONED_INVALID_ARGUMENT,
                    "type and shape of %s leave open how many bytes it has; give a known type and sizes of 0 or more", name);
    if (!buffer && !data && bytes)
        return fail(&request->failure, HONED_INVALID_ARGUMENT, "%s has no data; give a pointer to %lld bytes", name,
                    (long long)bytes);
    if (buffer && check_range(request, name, buffer, offset, (size_t)bytes))
        return request->failure.code;
    copied = malloc((rank ? rank : 1) * sizeof *copied);
    if (buffer) /* before `place` frees the old one, which may be the same */
        buffer_keep(buffer);
    binding = copied ? place(&request->inputs, name) : NULL;
    if (!binding) {
        free(copied);
        honed_buffer_free(buffer);
        return fail_memory(&request->failure);
    }
    if (rank)
        memcpy(copied, shape, rank * sizeof *copied);
    binding->shape = copied;
    binding->rank = rank;
    binding->type = type;
    binding->bytes = (size_t)bytes;
    binding->data = data;
    binding->buffer = buffer;
    binding->offset = offset;
    return HONED_OK;
}

honed_code honed_request_input(honed_request *request, const char *name, honed_type type, const int64_t *shape, size_t rank,
                               const void *data)
{
    return set_input(request, name, type, shape, rank, data, NULL, 0);
}

honed_code honed_request_input_like(honed_request *request, const honed_tensor *tensor, const void *data)
{
    return set_input(request, tensor->name, tensor->type, tensor->shape, tensor->rank, data, NULL, 0);
}

honed_code honed_request_input_shared(honed_request *request, const char *name, honed_type type, const int64_t *shape,
                                      size_t rank, honed_buffer *buffer, size_t offset)
{
    return set_input(request, name, type, shape, rank, NULL, buffer, offset);
}

static honed_code want(honed_request *request, const char *name, honed_buffer *buffer, size_t offset, size_t bytes)
{
    struct binding *binding;
    succeed(&request->failure);
    if (not_now(request) || (buffer && check_range(request, name, buffer, offset, bytes)))
        return request->failure.code;
    if (buffer)
        buffer_keep(buffer);
    binding = place(&request->wanted, name);
    if (!binding) {
        honed_buffer_free(buffer);
        return fail_memory(&request->failure);
    }
    binding->buffer = buffer;
    binding->offset = offset;
    binding->bytes = bytes;
    return HONED_OK;
}

honed_code honed_request_want(honed_request *request, const char *name)
{
    return want(request, name, NULL, 0, 0);
}

honed_code honed_request_want_shared(honed_request *request, const char *name, honed_buffer *buffer, size_t offset,
                                     size_t bytes)
{
    return want(request, name, buffer, offset, bytes);
}

void honed_request_clear(honed_request *request)
{
    if (under_way(&request->call))
        return;
    free_bindings(&request->inputs);
    free_bindings(&request->wanted);
    tensors_free(&request->outputs);
    request->sequence = request->flags = 0;
    succeed(&request->failure);
}

void honed_request_timeout(honed_request *request, int timeout)
{
    request->timeout = timeout;
}

void honed_request_priority(honed_request *request, int priority)
{
    request->priority = priority;
}

void honed_request_finite(honed_request *request, int finite)
{
    request->finite = finite != 0;
}

void honed_request_sequence(honed_request *request, uint64_t id, unsigned flags)
{
    request->sequence = id;
    request->flags = flags;
}

/* ---- Its result ---- */

size_t honed_request_output_count(const honed_request *request)
{
    return under_way(&request->call) ? 0 : request->outputs.count;
}

const honed_tensor *honed_request_output(const honed_request *request, size_t index)
{
    return index < honed_request_output_count(request) ? &request->outputs.of[index] : NULL;
}

const honed_tensor *honed_request_output_named(const honed_request *request, const char *name)
{
    for (size_t i = 0; i < honed_request_output_count(request); i++)
        if (!strcmp(request->outputs.of[i].name, name))
            return &request->outputs.of[i];
    return NULL;
}

honed_code honed_request_code(const honed_request *request)
{
    return request->call.failure.code;
}

const char *honed_request_error(const honed_request *request)
{
    return request->failure.text;
}

uint64_t honed_request_queue_us(const honed_request *request)
{
    return request->queue_us;
}

uint64_t honed_request_compute_us(const honed_request *request)
{
    return request->compute_us;
}

const char *honed_request_engine(const honed_request *request)
{
    return request->engine;
}
