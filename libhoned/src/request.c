/* Requests: what they bring, how they are made, and what came of them. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { ALIGNED = 64, ENGINE_BYTES = 32, FIRST_PAUSE = 100, LONGEST_PAUSE = 2000 }; /* bytes, and ms */
static const size_t MOST_INLINE = (size_t)1 << 30;

/* An input, or an output asked for. */
struct binding {
    char *name;
    int64_t *shape;
    size_t rank, bytes;
    honed_type type;
    const void *data;     /* of an input that is sent */
    honed_buffer *buffer; /* or where it lies; NULL for an output that is sent */
    size_t offset;
};

struct bindings {
    size_t count;
    struct binding *of;
};

struct honed_request {
    struct call call; /* first: calls are taken for it */
    honed_service *service;
    honed_request *next_done;
    bool collected; /* to be, by honed_collect */
    char *model;
    struct bindings inputs, wanted;
    int timeout, priority;
    bool finite;
    uint64_t sequence;
    unsigned flags;
    struct tensors outputs;
    void *data; /* of the outputs that were sent */
    size_t room;
    uint64_t queue_us, compute_us;
    char engine[ENGINE_BYTES];
    struct failure failure;
};

/* ---- Making and freeing ---- */

static void take_answer(struct call *call, const struct message *message, const struct value *result);

static void ended(struct call *call)
{
    honed_request *request = (honed_request *)call;
    honed_service *service = request->service;
    request->failure = call->failure;
    if (call->failure.code)
        tensors_free(&request->outputs);
    if (!request->collected)
        return;
    request->next_done = NULL;
    if (service->done_last)
        service->done_last->next_done = request;
    else
        service->done_first = request;
    service->done_last = request;
}

honed_request *honed_request_new(honed_service *service, const char *model)
{
    honed_request *request = calloc(1, sizeof *request);
    if (!request || !(request->model = strdup(model))) {
        free(request);
        return NULL;
    }
    request->call.take = take_answer;
    request->call.ended = ended;
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

/* Takes a request out of those that wait to be collected. */
static void forget_done(honed_service *service, honed_request *request)
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

static honed_code not_now(honed_request *request)
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

/* ---- The message ---- */

static int limit(const honed_request *request)
{
    return request->timeout >= 0 ? request->timeout : request->service->timeout;
}

static void put_place(struct frame *frame, const struct binding *binding)
{
    put_text(frame, "parameters");
    put_map(frame, 3);
    put_text(frame, "shared_memory_region");
    put_text(frame, binding->buffer->name);
    put_text(frame, "shared_memory_offset");
    put_uint(frame, binding->offset);
    put_text(frame, "shared_memory_byte_size");
    put_uint(frame, binding->bytes);
}

static void put_inputs(struct frame *frame, const struct bindings *inputs)
{
    size_t sent = 0;
    put_text(frame, "inputs");
    put_array(frame, inputs->count);
    for (size_t i = 0; i < inputs->count; i++) {
        const struct binding *input = &inputs->of[i];
        sent += !input->buffer;
        put_map(frame, input->buffer ? 4 : 3);
        put_text(frame, "name");
        put_text(frame, input->name);
        put_text(frame, "datatype");
        put_text(frame, honed_type_name(input->type));
        put_text(frame, "shape");
        put_array(frame, input->rank);
        for (size_t d = 0; d < input->rank; d++)
            put_int(frame, input->shape[d]);
        if (input->buffer)
            put_place(frame, input);
    }
    put_text(frame, "raw_input_contents");
    put_array(frame, sent);
    for (size_t i = 0; i < inputs->count; i++)
        if (!inputs->of[i].buffer)
            put_bytes(frame, inputs->of[i].data, inputs->of[i].bytes);
}

static void put_wanted(struct frame *frame, const struct bindings *wanted)
{
    put_text(frame, "outputs");
    put_array(frame, wanted->count);
    for (size_t i = 0; i < wanted->count; i++) {
        put_map(frame, wanted->of[i].buffer ? 2 : 1);
        put_text(frame, "name");
        put_text(frame, wanted->of[i].name);
        if (wanted->of[i].buffer)
            put_place(frame, &wanted->of[i]);
    }
}

static void put_parameters(struct frame *frame, const honed_request *request)
{
    int timeout = limit(request);
    bool start = request->flags & HONED_SEQUENCE_START, end = request->flags & HONED_SEQUENCE_END;
    put_text(frame, "parameters");
    put_map(frame, (size_t)((timeout >= 0) + (request->priority != 0) + 1 + (request->sequence ? 3 : 0)));
    if (timeout >= 0) {
        put_text(frame, "timeout");
        put_int(frame, timeout ? (int64_t)timeout * 1000 : 1);
    }
    if (request->priority) {
        put_text(frame, "priority");
        put_int(frame, request->priority);
    }
    put_text(frame, "finite");
    put_bool(frame, request->finite);
    if (request->sequence) {
        put_text(frame, "sequence_id");
        put_uint(frame, request->sequence);
        put_text(frame, "sequence_start");
        put_bool(frame, start);
        put_text(frame, "sequence_end");
        put_bool(frame, end);
    }
}

/* NULL, and why in the request's failure, where it cannot be made. */
static struct frame *message_of(honed_request *request)
{
    struct frame *frame;
    size_t room = 1024;
    for (size_t i = 0; i < request->inputs.count; i++) {
        const struct binding *input = &request->inputs.of[i];
        if (!input->buffer && (input->bytes > MOST_INLINE || (room += input->bytes + 512) > MOST_INLINE)) {
            fail(&request->failure, HONED_RESOURCE_EXHAUSTED,
                 "the inputs are too large for a message; put them in a honed_buffer");
            return NULL;
        }
    }
    frame = frame_new(room);
    if (frame) {
        put_request(frame, request->call.msgid, "ModelInfer");
        put_map(frame, request->wanted.count ? 5 : 4);
        put_text(frame, "model_name");
        put_text(frame, request->model);
        put_parameters(frame, request);
        put_inputs(frame, &request->inputs);
        if (request->wanted.count)
            put_wanted(frame, &request->wanted);
    }
    if (!frame || frame->failed) {
        frame_free(frame);
        fail_memory(&request->failure);
        return NULL;
    }
    return frame;
}

/* ---- The answer ---- */

static struct binding *wanted_shared(const honed_request *request, const char *name)
{
    for (size_t i = 0; i < request->wanted.count; i++)
        if (request->wanted.of[i].buffer && !strcmp(request->wanted.of[i].name, name))
            return &request->wanted.of[i];
    return NULL;
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
}

static bool make_room(honed_request *request, size_t bytes)
{
    void *data;
    if (bytes <= request->room)
        return true;
    if (posix_memalign(&data, ALIGNED, bytes))
        return false;
    free(request->data);
    request->data = data;
    request->room = bytes;
    return true;
}

/* Bytes that the outputs sent take, each aligned; false where they are not what the shapes say. */
static bool measure_contents(const honed_request *request, const struct message *message, const struct value *contents,
                             size_t *bytes)
{
    uint32_t sent = 0;
    *bytes = 0;
    for (size_t i = 0; i < request->outputs.count; i++) {
        const honed_tensor *output = &request->outputs.of[i];
        const struct binding *shared = wanted_shared(request, output->name);
        const struct value *content = shared ? NULL : item(message, contents, sent++);
        if (shared ? (int64_t)shared->bytes != output->bytes
                   : !content || content->kind != BYTES || (output->bytes >= 0 && content->size != output->bytes))
            return false;
        *bytes += content ? aligned(content->size) : 0;
    }
    return sent == (contents && contents->kind == ARRAY ? contents->size : 0);
}

static void take_contents(honed_request *request, const struct message *message, const struct value *contents)
{
    unsigned char *to = request->data;
    uint32_t sent = 0;
    for (size_t i = 0; i < request->outputs.count; i++) {
        honed_tensor *output = &request->outputs.of[i];
        const struct binding *shared = wanted_shared(request, output->name);
        if (shared) {
            output->data = (const char *)shared->buffer->data + shared->offset;
        } else {
            const struct value *content = item(message, contents, sent++);
            output->data = to;
            output->bytes = content->size;
            if (content->size)
                memcpy(to, message->bytes + content->at, content->size);
            to += aligned(content->size);
        }
    }
}

static uint64_t number_of(const struct value *value)
{
    return value && value->kind == NUMBER ? value->at : 0;
}

static void take_parameters(honed_request *request, const struct message *message, const struct value *parameters)
{
    const struct value *engine = find(message, parameters, "engine");
    request->queue_us = number_of(find(message, parameters, "queue_us"));
    request->compute_us = number_of(find(message, parameters, "compute_us"));
    request->engine[0] = 0;
    if (plain_text(message, engine) && engine->size && engine->size < sizeof request->engine) {
        memcpy(request->engine, message->bytes + engine->at, engine->size);
        request->engine[engine->size] = 0;
    }
}

static void take_answer(struct call *call, const struct message *message, const struct value *result)
{
    honed_request *request = (honed_request *)call;
    const struct value *contents = find(message, result, "raw_output_contents");
    size_t bytes;
    if (tensors_read(&request->outputs, message, find(message, result, "outputs"), false, &call->failure))
        return;
    if (!measure_contents(request, message, contents, &bytes)) {
        fail_nonsense(&call->failure, "outputs of other sizes than their shapes");
    } else if (!make_room(request, bytes ? bytes : 1)) {
        fail_memory(&call->failure);
    } else {
        take_contents(request, message, contents);
        take_parameters(request, message, find(message, result, "parameters"));
        request->flags = 0;
    }
}

/* ---- Making the call ---- */

static bool all_known(const struct bindings *bindings)
{
    for (size_t i = 0; i < bindings->count; i++)
        if (bindings->of[i].buffer && !buffer_known(bindings->of[i].buffer))
            return false;
    return true;
}

static bool uses(const struct bindings *bindings, const honed_buffer *buffer)
{
    for (size_t i = 0; i < bindings->count; i++)
        if (bindings->of[i].buffer == buffer)
            return true;
    return false;
}

static void tell(honed_request *request, const struct bindings *bindings)
{
    for (size_t i = 0; i < bindings->count; i++)
        if (request->call.state == CALL_HELD && bindings->of[i].buffer && !buffer_known(bindings->of[i].buffer))
            buffer_tell(bindings->of[i].buffer);
}

void requests_told(honed_buffer *buffer)
{
    honed_service *service = buffer->service;
    struct call *call = service->calls;
    while (call) {
        honed_request *request = (honed_request *)call; /* only requests are held */
        struct call *next = call->next;
        if (call->state == CALL_HELD && (uses(&request->inputs, buffer) || uses(&request->wanted, buffer))) {
            if (buffer->telling.failure.code) {
                call->failure = buffer->telling.failure;
                call_end(service, call);
            } else if (all_known(&request->inputs) && all_known(&request->wanted)) {
                call_release(service, call);
            }
        }
        call = next;
    }
}

static honed_code begin(honed_request *request, bool collected)
{
    honed_service *service = request->service;
    struct frame *frame;
    bool hold;
    succeed(&request->failure);
    if (not_now(request))
        return request->failure.code;
    forget_done(service, request); /* made again before it was collected */
    request->collected = collected;
    tensors_free(&request->outputs);
    if (service_connect(service, &request->failure))
        return request->call.failure.code = request->failure.code;
    request->call.msgid = ++service->msgids;
    frame = message_of(request);
    if (!frame)
        return request->call.failure.code = request->failure.code;
    hold = !all_known(&request->inputs) || !all_known(&request->wanted);
    call_begin(service, &request->call, frame, moment_after(limit(request)), hold);
    tell(request, &request->inputs);
    tell(request, &request->wanted);
    return HONED_OK;
}

honed_code honed_infer(honed_request *request)
{
    honed_code code = begin(request, false);
    if (code)
        return code;
    while (under_way(&request->call))
        pump(request->service, NEVER);
    set_timer(request->service);
    return request->call.failure.code;
}

honed_code honed_infer_patiently(honed_request *request, int patience)
{
    int64_t end = moment_after(patience);
    int pause = FIRST_PAUSE;
    for (;;) {
        honed_code code = honed_infer(request);
        int left = milliseconds_until(end);
        if (!honed_code_passes(code) || (request->sequence && code == HONED_DISCONNECTED) || (left >= 0 && left <= pause))
            return code;
        rest(pause);
        pause = 2 * pause < LONGEST_PAUSE ? 2 * pause : LONGEST_PAUSE;
    }
}

honed_code honed_submit(honed_request *request)
{
    honed_code code = begin(request, true);
    set_timer(request->service);
    return code;
}

honed_request *honed_collect(honed_service *service, int timeout)
{
    int64_t end = moment_after(timeout);
    honed_request *request;
    while (!service->done_first && !service->closed) {
        pump(service, service->calls ? end : 0); /* without a call, at least whether the service has gone */
        if (!service->done_first && (!service->calls || (end != NEVER && now() >= end)))
            break;
    }
    request = service->done_first;
    if (request) {
        service->done_first = request->next_done;
        if (!service->done_first)
            service->done_last = NULL;
    }
    if (!service->closed)
        set_timer(service);
    return request;
}

void honed_request_cancel(honed_request *request)
{
    if (under_way(&request->call))
        call_cancel(request->service, &request->call, HONED_CANCELLED, "the request was cancelled");
    if (!request->service->closed)
        set_timer(request->service);
}

/* ---- What came of it ---- */

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
