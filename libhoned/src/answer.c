/* The answer to a request: outputs to where they are wanted. */
#include <stdlib.h>
#include <string.h>

#include "request.h"

enum { ALIGNED = 64 }; /* bytes */

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

void take_answer(struct call *call, const struct message *message, const struct value *result)
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
        request->flags &= HONED_SEQUENCE_LAST_TOKEN;
        request->answered_on = request->service->connections;
    }
}
